"""Objects as bytes for processes that may lack the user's modules.

cloudpickle pickles what is defined in ``__main__`` by value, and what an importable module defines
by name: the process that loads it imports the module. A module that lies beside the user's script
is importable on the driver and missing on the executors. So here every class, function and module
that is not installed goes by value, wherever in the object it is found.
"""

from __future__ import annotations

import functools
import glob
import importlib
import io
import mmap
import os
import pickle
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from sparkdl.errors import TransportError

_BY_NAME = ("__main__", "sparkdl", "pyspark", "py4j")
"""Packages that no path tells: cloudpickle knows ``__main__``; the others are on all executors."""
_WITHOUT_VERSION = sys.stdlib_module_names | {"__main__", "cloudpickle", "sparkdl"}
"""Packages whose version no code of the user depends on, or that is equal where sparkdl is."""
_FOLDERS = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""The folders of installed packages, also those of other environments that a path was set to."""
Buffer = bytes | bytearray | memoryview
Apart = list[Buffer] | None
Refused = dict[int, str] | None
"""``id`` of an object of which no copy may travel -> what it is, in words."""
Bytes = bytes | list[Buffer]
"""Bytes, which come in parts from another process."""
LARGE_BYTES = 1 << 20
"""Size of a buffer from which on it may travel beside what holds it."""
PIECE_BYTES = 64 << 20
"""Bytes of what travels in one piece, which a JVM holds as a whole."""
_ALIGNMENT = 64
_MARK = b"sparkdl".ljust(57)
"""The beginning of a piece: after 7 bytes of pickle's in a file, so that the rest is aligned."""
_registry = threading.RLock()
"""cloudpickle's list of modules that go by value belongs to the process."""


def dump(thing: object) -> bytes:
    """Pickles ``thing``; every class, function and module in it that is not installed by value.

    Installed is what the standard library, ``site-packages``, a folder of ``pip install --target``,
    Spark and sparkdl bring. A module object (``import helper`` at the top of the user's script)
    whose content cannot be pickled goes by name.

    Raises:
        Exception: Something in it cannot be pickled; what cloudpickle raises.
    """
    return dump_with_packages(thing)[0]


def dump_with_packages(
    thing: object, apart: Apart = None, refused: Refused = None
) -> tuple[bytes, dict[str, str]]:
    """The bytes of :func:`dump`, and the packages that they go by the name of, with versions.

    Args:
        apart: Gets the large buffers (of arrays, of :func:`cut`), without which the bytes are then.
    """
    try:
        return _dump(thing, apart, refused, True)
    except Exception:
        return _dump(thing, apart, refused, False)


def parts_of(content: Bytes) -> list[Buffer]:
    """The bytes, one part after another."""
    return [content] if isinstance(content, bytes) else content


def joined(content: Bytes) -> bytes:
    """The bytes in one part."""
    return content if isinstance(content, bytes) else b"".join(content)


def cut(content: Bytes) -> list[pickle.PickleBuffer]:
    """Bytes as an object has them in its pickled state, if they may travel beside it."""
    return [
        pickle.PickleBuffer(memoryview(part)[start : start + LARGE_BYTES])
        for part in parts_of(content)
        for start in range(0, len(part), LARGE_BYTES)
    ]


@dataclass(frozen=True)
class Pickled:
    """An object's bytes and those of its large buffers, one after another, in pieces.

    Args:
        pieces: Each in memory, or the path of a file of this host. What processes look at of a file
            they have in memory together, and may change each for itself.
        sizes: Of the object's bytes, and of each buffer.
    """

    pieces: tuple[str | bytes, ...]
    sizes: tuple[int, ...]

    def read(self) -> Iterator[Buffer]:
        """The bytes and the buffers; what lies in two pieces is copied.

        Raises:
            TransportError: A file is missing.
        """
        pieces, piece = map(_opened, self.pieces), memoryview(b"")
        for size in self.sizes:
            parts = list[memoryview]()
            while left := size - sum(map(len, parts)):
                piece = piece or next(pieces)
                parts.append(piece[:left])
                piece = piece[len(parts[-1]) :]
            piece = piece[-size % _ALIGNMENT :]
            yield parts[0] if len(parts) == 1 else bytearray().join(parts)


def pieces_of(buffers: list[Buffer]) -> Iterator[bytes]:
    """The pieces of a :class:`Pickled`."""
    stream = b"".join(part for b in buffers for part in (b, bytes(-len(b) % _ALIGNMENT)))
    for start in range(0, len(stream), PIECE_BYTES):
        yield _MARK + stream[start : start + PIECE_BYTES]


def _opened(piece: str | bytes) -> memoryview:
    if isinstance(piece, bytes):
        return memoryview(bytearray(piece))[len(_MARK) :]  # arrays that can be written to
    try:
        with open(piece, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise TransportError(
            "a part of what this worker has to do is missing on its executor",
            expected="a file that Spark has written", received=str(error),
            hint="is the disk of spark.local.dir full, or does something else empty its folder?",
        ) from error  # fmt: skip
    start = mapped.find(_MARK) + len(_MARK)
    return memoryview(mapped)[start : start + (len(mapped) - start) // _ALIGNMENT * _ALIGNMENT]


def load(content: bytes | Pickled) -> Any:
    """The counterpart of :func:`dump`."""
    head, *buffers = (content,) if isinstance(content, bytes) else content.read()
    return cloudpickle.loads(head, buffers=buffers)


def load_apart(content: bytes) -> Any:
    """The same; classes that went by value are new ones, which no other load has or changes.

    cloudpickle gives all loads of one class in a process the same class, with the attributes that
    it had when the latest was dumped.
    """
    return _ApartUnpickler(io.BytesIO(content)).load()


class _ApartUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name in ("_make_skeleton_class", "_make_skeleton_enum"):
            # The last argument but one is the name by which cloudpickle finds the class again.
            return lambda *given: found(*given[:-2], None, given[-1])
        return found


def version_of(package: str) -> str:
    """The version of a package; empty: it tells none. A package that is imported tells it first."""
    told = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(told, str):
        return told
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _dump(
    thing: object, apart: Apart, refused: Refused, modules_by_value: bool
) -> tuple[bytes, dict[str, str]]:
    file = io.BytesIO()
    if apart:
        apart.clear()
    with _registry:
        pickler = _Pickler(file, modules_by_value, apart, refused or {})
        try:
            pickler.dump(thing)
        finally:
            pickler.unregister()
    told = {package: version_of(package) for package in sorted(pickler.packages)}
    return file.getvalue(), {package: found for package, found in told.items() if found}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Tells cloudpickle of a module that goes by value when the first object of it comes up."""

    def __init__(
        self, file: io.BytesIO, modules_by_value: bool, apart: Apart, refused: dict[int, str]
    ) -> None:
        def stays(buffer: pickle.PickleBuffer) -> bool:
            if apart is None or len(buffer.raw()) < LARGE_BYTES:
                return True
            apart.append(buffer.raw())
            return False

        super().__init__(file, buffer_callback=stays)
        self._refused = refused
        self._modules_by_value = modules_by_value
        self._seen: set[str] = set(cloudpickle.list_registry_pickle_by_value())
        self._registered: list[ModuleType] = []
        self.packages: set[str] = set()

    def reducer_override(self, obj: object) -> Any:
        if id(obj) in self._refused:
            raise pickle.PicklingError(f"they refer to {self._refused[id(obj)]}: it is the model's")
        if isinstance(obj, ModuleType):
            if self._modules_by_value:
                self._register(obj.__name__)
            elif _is_the_users(obj):
                return importlib.import_module, (obj.__name__,)
        elif isinstance(obj, (type, FunctionType)):
            self._register(obj.__module__)
        return super().reducer_override(obj)

    def _register(self, name: object) -> None:
        if not isinstance(name, str) or name in self._seen:
            return
        self._seen.add(name)
        module, package = sys.modules.get(name), name.partition(".")[0]
        if module is not None and _is_the_users(module):
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)
        elif package not in _WITHOUT_VERSION:
            self.packages.add(package)

    def unregister(self) -> None:
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_the_users(module: ModuleType) -> bool:
    """Whether a module is a Python file that no package manager installed."""
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] in _BY_NAME:
        return False
    path = os.path.realpath(file)
    if path.startswith(_FOLDERS) or not _PACKAGES.isdisjoint(path.split(os.sep)):
        return False
    if path.endswith(tuple(EXTENSION_SUFFIXES)):
        return False
    package, depth = module.__name__.partition(".")[0], module.__name__.count(".")
    depth += os.path.basename(path).startswith("__init__.")
    folder = path
    for _ in range(depth + 1):
        folder = os.path.dirname(folder)
    return package not in _installed_into(folder)


@functools.cache
def _installed_into(folder: str) -> frozenset[str]:
    """Packages that ``pip install --target`` has put into a folder, which lists their files."""
    found: set[str] = set()
    for listed in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with open(listed, encoding="utf-8", errors="replace") as lines:
            first = {line.partition(",")[0].partition("/")[0] for line in lines}
        found |= {name.removesuffix(".py") for name in first}
    return frozenset(found)
