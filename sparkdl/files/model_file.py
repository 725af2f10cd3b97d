"""A SparkModel as one ``.keras`` file: Keras' model, its settings, and what its rule keeps.

Such a file is a zip archive, and Keras opens one with sparkdl's parts as any other. Reading costs
no more memory than the file is long: a part whose declared size is larger than the whole file is
refused (sparkdl compresses nothing), and no more is unpacked than was declared.

And arrays of NumPy in the bytes of an ``.npz`` file, which may come from a stranger, too.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ModelError, ProtocolError, ResourceError
from sparkdl.files import storage
from sparkdl.files.run_state import RunState, StoredBytes

SETTINGS = "sparkdl.json"
RUN_STATE = "sparkdl_run_state"
RUN = "sparkdl_run"
_MAX_RUN_BYTES = 200
MAX_SETTINGS_BYTES = 1 << 20
MAX_EXPANSION = 16
"""How many times larger than the file its parts may be together, beyond the first 64 MiB."""
_FREE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How parts may be packed: the ways that zipfile unpacks piece by piece."""
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError,
    OverflowError,
)  # fmt: skip
"""The errors of zipfile about an archive or a part that is not whole, or that it cannot unpack."""
Settings = dict[str, object]


def with_parts(
    content: bytes,
    *,
    settings: Settings | None = None,
    state: RunState | None = None,
    run: str | None = None,
) -> bytes:
    """A ``.keras`` file with the SparkModel's settings, and the run's state and name, beside
    Keras' parts."""
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as archive:
        if settings is not None:
            archive.writestr(SETTINGS, json.dumps(settings))
        if state is not None:
            archive.writestr(RUN_STATE, state.to_bytes())
        if run is not None:
            archive.writestr(RUN, run)
    return buffer.getvalue()


def settings_of(content: bytes) -> Settings:
    """The settings in a ``.keras`` file; empty if it has none.

    Raises:
        ModelError: The bytes are no whole ``.keras`` file, or its settings are malformed.
    """
    part = _read(content, SETTINGS, MAX_SETTINGS_BYTES)
    try:
        settings = {} if part is None else json.loads(part)
    except (ValueError, RecursionError) as error:
        raise _malformed(SETTINGS, "a JSON object", f"{type(error).__name__}: {error}") from error
    if not isinstance(settings, dict):
        raise _malformed(SETTINGS, "a JSON object", f"a {type(settings).__name__}")
    return settings


def run_state_of(content: bytes) -> RunState | None:
    """The run's state in a ``.keras`` file; None if it has none.

    Raises:
        ModelError: The bytes are no whole ``.keras`` file, or its state is malformed.
    """
    part = _read(content, RUN_STATE, len(content))
    if part is None:
        return None
    try:
        return RunState.from_bytes(part)
    except ProtocolError as error:
        raise _malformed(RUN_STATE, error.expected, error.received) from error


def run_of(content: bytes) -> str:
    """The name of the run that wrote a ``.keras`` file; empty if it does not say.

    Raises:
        ModelError: The bytes are no whole ``.keras`` file, or the name is malformed.
    """
    part = _read(content, RUN, _MAX_RUN_BYTES) or b""
    try:
        return part.decode()
    except ValueError as error:
        raise _malformed(RUN, "a name", f"{type(error).__name__}: {error}") from error


def check_whole(content: bytes) -> None:
    """Reads every part once, in pieces.

    Raises:
        ModelError: The file is cut off, a part has changed or is not as long as it declares, or
            its parts are absurdly large.
    """
    with _opened(content) as archive:
        for part in archive.infolist():
            try:
                size = _unpacked_size(archive, part)
            except _DAMAGE as error:
                raise _malformed(
                    part.filename, "the bytes that were written", f"{type(error).__name__}: {error}"
                ) from error
            if size != part.file_size:
                raise _malformed(part.filename, f"{part.file_size} bytes, as it declares", "more")


def sane_bytes(packed: int) -> int:
    """The most bytes that packed files may become, so that reading them is no attack."""
    return _FREE_BYTES + MAX_EXPANSION * packed


def _unpacked_size(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> int:
    """How many bytes a part has, or one more than it declares if it has more than that."""
    longer = copy.copy(part)
    longer.file_size += 1  # zipfile looks no further than this, however much there is
    with archive.open(longer) as file:
        return sum(len(piece) for piece in iter(lambda: file.read(_PIECE_BYTES), b""))


def _opened(content: bytes) -> zipfile.ZipFile:
    """The archive, if what it declares is sane."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except _DAMAGE as error:
        raise ModelError(
            "this is no Keras file", expected="a whole .keras file",
            received=f"{len(content)} bytes: {error}",
        ) from error  # fmt: skip
    for part in archive.infolist():
        if part.compress_type not in _METHODS:
            told = f"compression method {part.compress_type}"
            raise _malformed(part.filename, "a part that is stored, or deflated", told)
    declared = sum(part.file_size for part in archive.infolist())
    allowed = sane_bytes(len(content))
    if declared > allowed:
        raise ModelError(
            "this Keras file would fill the memory",
            expected=f"parts of at most {allowed} bytes together in a file of {len(content)} bytes",
            received=f"parts that declare {declared} bytes",
            hint="Keras compresses nothing: load and save a file that was compressed by hand",
        )
    return archive


def _read(content: bytes, name: str, at_most: int) -> bytes | None:
    with _opened(content) as archive:
        try:
            size = archive.getinfo(name).file_size
        except KeyError:
            return None
        if size > min(at_most, len(content)):
            raise _malformed(name, f"at most {min(at_most, len(content))} bytes", f"{size} bytes")
        try:
            with archive.open(name) as file:
                return file.read(size)  # read() would unpack more, where there is more
        except _DAMAGE as error:
            raise _malformed(name, "a whole part", f"{type(error).__name__}: {error}") from error


def _malformed(name: str, expected: str, received: str) -> ModelError:
    return damaged_model(f"the part {name!r} of a Keras file is malformed", expected, received)


def damaged_model(what: str, expected: str, received: str) -> ModelError:
    """The error for a model's bytes that are not those that were written."""
    return ModelError(
        what, expected=expected, received=received,
        hint="it was damaged, writing it did not end, or sparkdl did not write it",
    )  # fmt: skip


def pack_arrays(arrays: dict[str, Any]) -> bytes:
    """Arrays and numbers by name as bytes, not compressed."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def store_arrays(
    arrays: Mapping[str, npt.NDArray[Any] | int | float],
    pieces: Iterable[tuple[str, int, Iterable[npt.NDArray[np.float32]]]],
) -> StoredBytes:
    """The same as :func:`pack_arrays`, in a file, of arrays that are never whole in memory.

    Args:
        arrays: Small ones.
        pieces: The name of each flat array, the number of its elements, and its parts in order.
    """
    stored = StoredBytes()
    with zipfile.ZipFile(stored.file, "w") as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(value), allow_pickle=False)
        for name, size, parts in pieces:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                head = {"descr": "<f4", "fortran_order": False, "shape": (size,)}
                np.lib.format.write_array_header_1_0(entry, head)
                for part in parts:
                    entry.write(np.ascontiguousarray(part).view(np.uint8).data)
    stored.file.flush()
    return stored


def unpack_arrays(content: bytes, what: str) -> dict[str, npt.NDArray[Any]]:
    """The counterpart of :func:`pack_arrays`; nothing in the bytes is executed or unpickled.

    Args:
        what: Whose they are, for the message.

    Raises:
        ModelError: They are damaged, or would fill the memory.
    """
    try:
        check_whole(content)
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            found = dict(arrays.items())
        for name, array in found.items():
            if not isinstance(array, np.ndarray):  # numpy gives such parts as bytes
                raise ValueError(f"{name} is no array")
        return found
    except ModelError as error:
        raise damaged_model(f"{what} cannot be read", error.expected, error.received) from error
    except Exception as error:  # numpy reads the head of an array as Python's syntax
        told = f"{type(error).__name__}: {str(error)[:200]}"
        raise damaged_model(f"{what} cannot be read", "arrays of NumPy", told) from error


HDF5 = (".h5", ".hdf5")
"""Endings of files in Keras' older format."""
_HDF5_BEGIN = b"\x89HDF\r\n\x1a\n"
"""First bytes of such a file, whatever its name is."""


@dataclass(frozen=True)
class ModelFile:
    """The content of a ``.keras`` file.

    Args:
        content: All of it, for Keras.
        settings: Settings of the SparkModel; empty if plain Keras wrote the file.
        state: State of its runs; None if plain Keras wrote the file.
    """

    content: bytes
    settings: Settings
    state: RunState | None


def check_path(path: str, *, overwrite: bool) -> None:
    """Finds out, before a model is packed, whether it can be written to ``path``.

    Raises:
        ConfigError: The path does not end in ``.keras``.
        ResourceError: The path cannot be written, or exists and ``overwrite`` is False.
    """
    if not str(path).endswith(".keras"):
        raise ConfigError(
            "the path does not name a Keras file", expected="a path that ends in '.keras'",
            received=repr(path),
        )  # fmt: skip
    require_writable(path, overwrite=overwrite)


def require_writable(path: str, *, overwrite: bool) -> None:
    """Raises ResourceError if the path cannot be written, or exists and shall stay."""
    if not overwrite and storage.exists(path):
        raise ResourceError(
            f"{path!r} exists", expected="a new path", received="an existing one",
            hint="save(path, overwrite=True)",
        )  # fmt: skip
    storage.check_writable(path)


def write_model(path: str, content: bytes, settings: Settings, state: RunState) -> None:
    """Writes a model, its settings and the state of its runs as one ``.keras`` file.

    Args:
        path: A path or URI that :func:`check_path` has found to be good.
        content: The model as the bytes of a ``.keras`` file.
        state: What ``content`` does not hold: epochs done, and what the rule keeps.
    """
    storage.write_bytes(path, with_parts(content, settings=settings, state=state))


def read_model(path: str) -> ModelFile:
    """The counterpart of :func:`write_model`; Keras has yet to load the content.

    Raises:
        ModelError: It is no ``.keras`` file, or sparkdl's parts in it are malformed.
    """
    content = storage.read_bytes(path)
    if content.startswith(_HDF5_BEGIN):
        raise ModelError(
            f"{path!r} is a file of Keras' older format, which holds no settings of sparkdl",
            expected="a .keras file", received="an HDF5 file",
            hint=f"SparkModel(keras.models.load_model({path!r}))",
        )  # fmt: skip
    with errors_named(path):
        check_whole(content)
        return ModelFile(content, settings_of(content), run_state_of(content))


def read_keras_file(path: str) -> bytes:
    """The content of a file that Keras wrote, for Keras to load.

    Args:
        path: A path or URI; a ``.keras`` file unless it ends as one of :data:`HDF5` does.

    Raises:
        ModelError: It is no whole ``.keras`` file.
    """
    content = storage.read_bytes(path)
    if not path.endswith(HDF5):
        check_keras_file(content, path)
    return content


def check_keras_file(content: bytes, path: str) -> None:
    """Refuses what is no ``.keras`` file that Keras can unpack.

    Args:
        path: Where it is from, for the message.

    Raises:
        ModelError: It is cut off or damaged, or would fill the memory.
    """
    with errors_named(path):
        check_whole(content)


@contextlib.contextmanager
def errors_named(path: str) -> Iterator[None]:
    """Around what is done with a file: errors name it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(
            f"{path!r}: {error.what}", expected=error.expected, received=error.received,
            hint=error.hint,
        ) from error  # fmt: skip


def read_config(content: bytes) -> bytes:
    """The architecture and the compile settings in a ``.keras`` archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("config.json")
