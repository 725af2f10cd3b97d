"""``FileSystem``: what a file system does for sparkdl; how most of them write a file whole.

The local one is here, and those of pyarrow and fsspec are.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol
from urllib.parse import quote

from sparkdl.errors import ResourceError

Kind = Literal["file", "folder"]

_PARTIAL = re.compile(r"\.sparkdl-[0-9a-f]{24}\.part")
_PATH_IN_URI = re.compile(r"([^:]+:(?://[^/?]*)?)([^?]*)(.*)", re.DOTALL)


class DamagedFileError(ResourceError):
    """A file is there and is not what was written; to read it again gives nothing else."""


class NoFileSystemError(ResourceError):
    """Neither pyarrow nor fsspec reaches a path from this process; Spark may."""


@dataclass(frozen=True)
class FileEntry:
    """A file in a folder.

    Args:
        name: In the folder.
        size_bytes: None where the file system does not say.
        changed_at: When it was written, in seconds since 1970; None where it does not say.
    """

    name: str
    size_bytes: int | None
    changed_at: float | None


class FileSystem(Protocol):
    """Whole files. Each method raises OSError or ValueError where it fails."""

    @property
    def plain(self) -> bool:
        """Whether other programs read what is written as the same file."""

    def write(self, path: str, content: bytes) -> None:
        """Writes a file whole or not at all, and the folders above it."""

    @abstractmethod
    def read(self, path: str, at_most: int | None) -> bytes:
        """A whole file, or its first ``at_most`` bytes.

        Raises:
            DamagedFileError: The file system finds that it is not what was written.
        """

    @abstractmethod
    def find(self, path: str) -> Kind | None:
        """The kind of the entry that is there; None for nothing."""

    @abstractmethod
    def files_in(self, folder: str) -> list[FileEntry]:
        """The files right in a folder, sorted by their names; not pipes, devices and sockets."""

    def check_writable(self, path: str) -> None:
        """Tries to write next to ``path``."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Deletes a file."""

    def delete_partial(self, folder: str, older_than_s: float) -> None:
        """Deletes what writers that were killed have left right in a folder."""


class RenamingFileSystem(FileSystem):
    """Writes into a new file beside the wanted one, which is then renamed.

    The new file has a name that nobody else has or can guess: several threads or machines that
    write one path do not mix their contents, the last rename wins. An interrupt leaves the file as
    it was and nothing beside it. Where the system does not rename over a file, the old one is
    renamed first, and back if the new one does not get its name: neither is deleted before the
    other is there.
    """

    plain = True

    def write(self, path: str, content: bytes) -> None:
        self._refuse_folder(path)  # some systems would move the file into it
        partial = self._write_beside(path, content)
        with self._deleting_on_error(partial):
            try:
                self._rename(partial, path)
                return
            except Exception:  # the systems refuse in many words
                if self.find(path) != "file":
                    raise
        old = self._name_beside(path)
        try:
            self._rename(path, old)  # where nothing can be renamed, this raises as well
            self._rename(partial, path)
        except BaseException as error:
            try:
                if self.find(path) is None:
                    self._rename(old, path)
            except Exception:
                raise OSError(
                    f"{path} did not get its new content, which is in {partial}; the old one, if "
                    f"it is not there, is in {old} ({type(error).__name__}: {error})"
                ) from error
            self._delete_quietly(partial)
            self._delete_quietly(old)
            raise
        self._delete_quietly(old)

    def check_writable(self, path: str) -> None:
        self._refuse_folder(path)
        self.delete(self._write_beside(path, b"ok"))

    def delete_partial(self, folder: str, older_than_s: float) -> None:
        """See :class:`FileSystem`. Where the system does not say how old a file is, it stays."""
        for file in self.files_in(folder):
            old = file.changed_at is not None and file.changed_at < time.time() - older_than_s
            if old and _PARTIAL.fullmatch(file.name):
                self._delete_quietly(os.path.join(folder, file.name))

    def _refuse_folder(self, path: str) -> None:
        if self.find(path) == "folder":
            raise IsADirectoryError(f"{path} is a folder")

    def _write_beside(self, path: str, content: bytes) -> str:
        if folder := os.path.dirname(path):
            self._make_folder(folder)
        partial = self._name_beside(path)
        with self._deleting_on_error(partial):
            self._create(partial, content)
        return partial

    def _name_beside(self, path: str) -> str:
        return os.path.join(os.path.dirname(path), f".sparkdl-{secrets.token_hex(12)}.part")

    @contextlib.contextmanager
    def _deleting_on_error(self, partial: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._delete_quietly(partial)  # the error that brought us here is to be told
            raise

    def _delete_quietly(self, path: str) -> None:
        with contextlib.suppress(Exception):
            self.delete(path)

    @abstractmethod
    def _make_folder(self, path: str) -> None:
        """Makes a folder and those above it, where they are missing."""

    @abstractmethod
    def _create(self, path: str, content: bytes) -> None:
        """A new file with that content, which is on the disk when this returns."""

    @abstractmethod
    def _rename(self, source: str, target: str) -> None:
        """Renames a file to a new name, or over another file; raises if the system does not."""


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
        return "folder" if os.path.isdir(path) else "file" if os.path.lexists(path) else None

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

        found = [
            FileEntry(info.base_name, info.size, info.mtime_ns and info.mtime_ns / 1e9)
            for info in self.arrow.get_file_info(fs.FileSelector(folder))
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
