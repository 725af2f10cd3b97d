"""Files too large to be read whole: opened, written, moved.

Unlike :mod:`sparkdl.files.storage` this asks pyarrow and fsspec alone, as executors can: they have
no session that could be asked. ResourceError says what could not be found, read or written.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from sparkdl.files.file_system import open_regular, open_uri
from sparkdl.files.storage import SCHEME, explained, local_path


@dataclass(frozen=True)
class FilePlace:
    """A path on its file system.

    Args:
        inner: The path in it.
        prefix: What stands before ``inner`` in the user's path.
        suffix: What stands behind it: a query.
    """

    system: Any
    inner: str
    prefix: str = ""
    suffix: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, as far as its file system says."""
        from pyarrow import fs

        return isinstance(self.system, fs.LocalFileSystem)

    def outer(self, inner: str) -> str:
        """A path of this file system as the user would write it."""
        return f"{self.prefix}{inner}{self.suffix}"


def place_of(path: str) -> FilePlace:
    """The place of a path or URI."""
    from pyarrow import fs

    match = SCHEME.match(path)
    if match is None:
        return FilePlace(fs.LocalFileSystem(), os.path.abspath(path))
    scheme = match[1].lower()
    if scheme == "file":
        return FilePlace(fs.LocalFileSystem(), local_path(path))
    system, inner = open_uri(path, scheme)
    for whole in (path, path.partition("?")[0].rstrip("/")):
        if whole.endswith(inner):
            suffix = path[len(whole) :].lstrip("/")
            return FilePlace(system.arrow, inner, whole[: -len(inner)], suffix)
    return FilePlace(system.arrow, inner)


def open_input(path: str, *, mapped: bool = False, place: FilePlace | None = None) -> BinaryIO:
    """A file, open for reading from any position.

    Args:
        mapped: Whether a file of this machine is mapped into memory, so that what is read of it is
            no copy. It must not become shorter meanwhile.
        place: Place of the file, if it is known: to find it may ask another machine.
    """
    from pyarrow import fs

    place = place or place_of(path)
    system = fs.LocalFileSystem(use_mmap=True) if mapped and place.is_local else place.system
    with explained("read", path):
        if place.is_local:
            open_regular(place.inner).close()  # Arrow would wait for the writer of a pipe
        return cast(BinaryIO, system.open_input_file(place.inner))


def is_local(path: str) -> bool:
    """Whether a path means a file of this machine, as far as its file system says."""
    return place_of(path).is_local


def create_output(path: str) -> BinaryIO:
    """A new file with the folders above it, open for writing; one that is there is overwritten."""
    place = place_of(path)
    with explained("written", path):
        place.system.create_dir(os.path.dirname(place.inner), recursive=True)
        return cast(BinaryIO, place.system.open_output_stream(place.inner, compression=None))


def move(source: str, target: str) -> None:
    """Moves a file to another path of its file system; makes the folders above it."""
    old, new = place_of(source), place_of(target)
    with explained("written", target):
        old.system.create_dir(os.path.dirname(new.inner), recursive=True)
        old.system.move(old.inner, new.inner)


def delete_folder(path: str) -> None:
    """Deletes a folder with all in it, if it is there."""
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
