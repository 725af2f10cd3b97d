"""Local files, and the file systems of pyarrow and fsspec."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import Any, BinaryIO
from urllib.parse import quote

from sparkdl.errors import ResourceError
from sparkdl.files.file_system import FileEntry, Kind, RenamingFileSystem

_PATH_IN_URI = re.compile(r"([^:]+:(?://[^/?]*)?)([^?]*)(.*)", re.DOTALL)


class NoFileSystemError(ResourceError):
    """Neither pyarrow nor fsspec reaches a path from this process; Spark may."""


def open_regular(path: str) -> BinaryIO:
    """A file of this machine, open for reading; it has an end, and nobody is waited for.

    Raises:
        OSError: It cannot be read, or is a pipe, a device or a socket, on which a reader may wait
            for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe has no writer
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("a folder, pipe, device or socket where a regular file was expected")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


class LocalFileSystem(RenamingFileSystem):
    """Files of this machine."""

    def read(self, path: str, at_most: int | None) -> bytes:
        with open_regular(path) as file:
            return file.read(-1 if at_most is None else at_most)

    def find(self, path: str) -> Kind | None:
        if os.path.isdir(path):
            return "folder"
        return "file" if os.path.lexists(path) else None

    def files_in(self, folder: str) -> list[FileEntry]:
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it was deleted, or links nowhere
                    about = entry.stat()
                    if stat.S_ISREG(about.st_mode):
                        found.append(FileEntry(entry.name, about.st_size, about.st_mtime))
        return sorted(found, key=lambda file: file.name)

    def delete(self, path: str) -> None:
        os.remove(path)

    def _make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def _create(self, path: str, content: bytes) -> None:
        with open(path, "xb") as file:  # a file or symbolic link that is there is an error
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _rename(self, source: str, target: str) -> None:
        os.replace(source, target)
        with contextlib.suppress(OSError):  # the folder's entries, where the system can
            descriptor = os.open(os.path.dirname(target), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class ArrowFileSystem(RenamingFileSystem):
    """One of pyarrow's file systems, or one of fsspec's inside it.

    Args:
        arrow: A ``pyarrow.fs.FileSystem``.
    """

    def __init__(self, arrow: Any) -> None:
        self.arrow = arrow

    def read(self, path: str, at_most: int | None) -> bytes:
        with self.arrow.open_input_stream(path, compression=None) as file:
            return bytes(file.read(at_most))

    def find(self, path: str) -> Kind | None:
        from pyarrow import fs

        kind = self.arrow.get_file_info(path).type
        if kind == fs.FileType.NotFound:
            return None
        return "folder" if kind == fs.FileType.Directory else "file"

    def files_in(self, folder: str) -> list[FileEntry]:
        from pyarrow import fs

        infos = self.arrow.get_file_info(fs.FileSelector(folder))
        found = [
            FileEntry(info.base_name, info.size, info.mtime_ns and info.mtime_ns / 1e9)
            for info in infos
            if info.type == fs.FileType.File
        ]
        return sorted(found, key=lambda file: file.name)

    def delete(self, path: str) -> None:
        self.arrow.delete_file(path)

    def _make_folder(self, path: str) -> None:
        self.arrow.create_dir(path, recursive=True)

    def _create(self, path: str, content: bytes) -> None:
        with self.arrow.open_output_stream(path, compression=None) as file:
            file.write(content)

    def _rename(self, source: str, target: str) -> None:
        self.arrow.move(source, target)
        if self.find(source) is not None:  # fsspec's WebHDFS leaves it there without a word
            raise FileExistsError(f"{source} was not renamed to {target}")


def open_uri(uri: str, scheme: str) -> tuple[ArrowFileSystem, str]:
    """The file system of a URI, and the path inside it.

    Raises:
        ResourceError: Neither pyarrow nor fsspec has one for it.
    """
    from pyarrow import fs

    try:
        ((start, path, query),) = _PATH_IN_URI.findall(uri)
        # letter by letter, as to Spark and fsspec: pyarrow would decode a folder t=10%3A00
        arrow, inner = fs.FileSystem.from_uri(f"{start}{quote(path)}{query}")
        return ArrowFileSystem(arrow), inner
    except Exception as first:
        try:
            import fsspec

            other, inner = fsspec.core.url_to_fs(uri)
            return ArrowFileSystem(fs.PyFileSystem(fs.FSSpecHandler(other))), inner
        except Exception as error:
            raise NoFileSystemError(
                f"no file system for {uri!r}",
                expected="a local path, or a URI that Spark, pyarrow or fsspec knows",
                received=f"{type(first).__name__}: {str(first).partition(chr(10))[0]}",
                hint=f"where Spark reads {scheme}:/, start its session first; or install the "
                f"fsspec driver for {scheme}://",
            ) from error
