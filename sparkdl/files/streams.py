"""Files too large to be read whole: found by pattern with their sizes, opened, written, moved.

Unlike :mod:`sparkdl.files.storage` this asks pyarrow and fsspec alone, as executors can: they have
no session that could be asked.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from sparkdl.errors import ResourceError
from sparkdl.files.arrow_file_system import open_regular, open_uri
from sparkdl.files.storage import SCHEME, explained, local_path

_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class FoundFile:
    """A file, and how large it is.

    Args:
        path: As :func:`open_input` takes it.
        size_bytes: Its size.
        inner: Its path from the folder on in which it was looked for.
    """

    path: str
    size_bytes: int
    inner: str

    @property
    def partition_values(self) -> dict[str, str]:
        """Values of all rows, from the folders: ``{'day': '3'}`` for ``day=3/f``."""
        from urllib.parse import unquote

        folders = [name for name in self.inner.split("/")[:-1] if "=" in name]
        return {key: unquote(value) for key, _, value in (f.partition("=") for f in folders)}


@dataclass(frozen=True)
class FilePlace:
    """A path on its file system.

    Args:
        system: Pyarrow's file system.
        inner: The path in it.
        prefix: What stands before ``inner`` in the user's path.
    """

    system: Any
    inner: str
    prefix: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, as far as its file system says."""
        from pyarrow import fs

        return isinstance(self.system, fs.LocalFileSystem)

    def outer(self, inner: str) -> str:
        """A path of this file system as the user would write it."""
        return self.prefix + inner


def place_of(path: str) -> FilePlace:
    """The place of a path or URI.

    Raises:
        ResourceError: No file system knows it.
    """
    from pyarrow import fs

    match = SCHEME.match(path)
    if match is None:
        return FilePlace(fs.LocalFileSystem(), os.path.abspath(path))
    scheme = match[1].lower()
    if scheme == "file":
        return FilePlace(fs.LocalFileSystem(), local_path(path))
    system, inner = open_uri(path, scheme)
    return FilePlace(system.arrow, inner, path[: -len(inner)] if path.endswith(inner) else "")


def find_files(path: str, ending: str = "") -> list[FoundFile]:
    """The files that a path means, ordered by path.

    Args:
        path: A file, a folder (with those below it; names that begin with ``_`` or ``.`` do not
            count), or a pattern with ``*``, ``?`` and ``[...]`` of such files or folders.
        ending: Only files whose names end so, in a folder.

    Raises:
        ResourceError: There is no such file, or the folder cannot be looked into.
    """
    head, wild = path, _WILD.search(path)
    if wild is not None:
        head = path[: path.rindex("/", 0, wild.start())] if "/" in path[: wild.start()] else "."
    place = place_of(head or "/")
    with explained("read", path):
        if wild is None:
            found = _in(place, place.inner, ending)
        else:
            pattern = path[len(head) + 1 :] if head != "." else path
            found = [
                file
                for top in _matching(place, pattern.split("/"))
                for file in _in(place, top, ending)
            ]
    if not found:
        raise ResourceError(
            f"no files at {path!r}",
            expected="a file, a folder with files, or a pattern such as '/data/*.tfrecord'",
            received="nothing that can be read" + (f" and ends with {ending!r}" if ending else ""),
            hint="this machine and the executors must see the same files",
        )
    return found


def _in(place: FilePlace, top: str, ending: str) -> list[FoundFile]:
    """The file ``top``, or those below the folder ``top``."""
    from pyarrow import fs

    info = place.system.get_file_info(top)
    if info.type == fs.FileType.File:
        name = top.rsplit("/", 1)[-1]
        return [FoundFile(place.outer(top), int(info.size), name)]
    if info.type != fs.FileType.Directory:
        return []
    files = []
    for info in place.system.get_file_info(fs.FileSelector(top, recursive=True)):
        inner = info.path[len(top) :].strip("/")
        hidden = any(name[:1] in ("_", ".") and "=" not in name for name in inner.split("/"))
        if info.type == fs.FileType.File and not hidden and inner.endswith(ending):
            files.append(FoundFile(place.outer(info.path), int(info.size), inner))
    return sorted(files, key=lambda file: file.path)


def _matching(place: FilePlace, pattern: list[str]) -> list[str]:
    """The paths below a folder that fit a pattern, name by name."""
    from pyarrow import fs

    tops = [place.inner]
    for number, wanted in enumerate(pattern):
        infos = [
            info
            for top in tops
            for info in place.system.get_file_info(fs.FileSelector(top))
            if fnmatch.fnmatchcase(info.path.rstrip("/").rsplit("/", 1)[-1], wanted)
        ]
        if number < len(pattern) - 1:
            infos = [info for info in infos if info.type == fs.FileType.Directory]
        tops = sorted(info.path for info in infos)
    return tops


def open_input(path: str, *, mapped: bool = False, place: FilePlace | None = None) -> BinaryIO:
    """A file, open for reading from any position.

    Args:
        path: Of the file.
        mapped: Whether a file of this machine is mapped into memory, so that what is read of it is
            no copy. It must not become shorter meanwhile.
        place: Of the file, if it is known: to find it may ask another machine.

    Raises:
        ResourceError: It cannot be read.
    """
    from pyarrow import fs

    place = place or place_of(path)
    system = place.system
    if mapped and place.is_local:
        system = fs.LocalFileSystem(use_mmap=True)
    with explained("read", path):
        if place.is_local:
            open_regular(place.inner).close()  # Arrow would wait for the writer of a pipe
        return cast(BinaryIO, system.open_input_file(place.inner))


def is_local(path: str) -> bool:
    """Whether a path means a file of this machine, as far as its file system says."""
    return place_of(path).is_local


def create_output(path: str) -> BinaryIO:
    """A new file with the folders above it, open for writing; one that is there is overwritten.

    Raises:
        ResourceError: It cannot be written.
    """
    place = place_of(path)
    with explained("written", path):
        place.system.create_dir(os.path.dirname(place.inner), recursive=True)
        return cast(BinaryIO, place.system.open_output_stream(place.inner, compression=None))


def move(source: str, target: str) -> None:
    """Moves a file to another path of its file system; makes the folders above it.

    Raises:
        ResourceError: It cannot be moved.
    """
    old, new = place_of(source), place_of(target)
    with explained("written", target):
        old.system.create_dir(os.path.dirname(new.inner), recursive=True)
        old.system.move(old.inner, new.inner)


def delete_folder(path: str) -> None:
    """Deletes a folder with all in it, if it is there.

    Raises:
        ResourceError: It cannot be deleted.
    """
    from pyarrow import fs

    place = place_of(path)
    with explained("written", path):
        if place.system.get_file_info(place.inner).type == fs.FileType.Directory:
            place.system.delete_dir(place.inner)


def delete_file(path: str) -> None:
    """Deletes a file, if it is there."""
    place = place_of(path)
    with contextlib.suppress(OSError):
        place.system.delete_file(place.inner)
