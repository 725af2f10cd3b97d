"""Files anywhere: local paths, ``file://``, ``hdfs://``, ``s3://`` and what fsspec knows."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

from sparkdl.errors import ResourceError


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file whole or not at all.

    The content goes into a new file beside it, of a name that nobody else has or can guess, which
    is then renamed: several threads or machines that write one path do not mix their contents, the
    last rename wins. On a local disk the content is there before the name is. An interrupt leaves
    the file as it was and nothing beside it.

    Raises:
        ResourceError: The path cannot be written.
    """
    filesystem, inner = _resolve(path)
    with _explained("written", path):
        _make_parent(filesystem, inner)
        with _new_file_beside(filesystem, inner, content) as partial:
            _replace(filesystem, partial, inner)


def read_bytes(path: str, at_most: int | None = None) -> bytes:
    """Reads a whole file.

    Args:
        path: A path or URI.
        at_most: More bytes than that are an error.

    Raises:
        ResourceError: The path cannot be read, or the file is longer than ``at_most``.
    """
    filesystem, inner = _resolve(path)
    with _explained("read", path), filesystem.open_input_stream(inner) as file:
        content = bytes(file.read(None if at_most is None else at_most + 1))
    if at_most is not None and len(content) > at_most:
        raise ResourceError(
            f"{path!r} is too long", expected=f"at most {at_most} bytes", received="more"
        )
    return content


def read_folder(path: str) -> dict[str, bytes]:
    """All files in a folder and in the folders below it: path inside the folder -> content.

    Raises:
        ResourceError: The folder cannot be read.
    """
    from pyarrow import fs

    filesystem, inner = _resolve(path)
    found: dict[str, bytes] = {}
    with _explained("read", path):
        for entry in filesystem.get_file_info(fs.FileSelector(inner, recursive=True)):
            if entry.type == fs.FileType.File:
                with filesystem.open_input_stream(entry.path) as file:
                    found[os.path.relpath(entry.path, inner)] = bytes(file.read())
    return found


def exists(path: str) -> bool:
    """Whether a file or folder is there.

    Raises:
        ResourceError: The path cannot be looked at.
    """
    from pyarrow import fs

    filesystem, inner = _resolve(path)
    with _explained("read", path):
        return bool(filesystem.get_file_info(inner).type != fs.FileType.NotFound)


def check_writable(path: str) -> None:
    """Tries to write next to ``path``, so that a long fit does not end in a full disk's error.

    Raises:
        ResourceError: The path cannot be written.
    """
    from pyarrow import fs

    filesystem, inner = _resolve(path)
    with _explained("written", path):
        if filesystem.get_file_info(inner).type == fs.FileType.Directory:
            raise IsADirectoryError(f"{inner} is a folder")
        _make_parent(filesystem, inner)
        with _new_file_beside(filesystem, inner, b"ok") as probe:
            filesystem.delete_file(probe)


def delete(path: str) -> None:
    """Deletes a file if it is there."""
    filesystem, inner = _resolve(path)
    with contextlib.suppress(OSError):
        filesystem.delete_file(inner)


def _make_parent(filesystem: Any, inner: str) -> None:
    parent = os.path.dirname(inner)
    if parent:
        filesystem.create_dir(parent, recursive=True)


@contextlib.contextmanager
def _new_file_beside(filesystem: Any, inner: str, content: bytes) -> Iterator[str]:
    """A new file in the folder of ``inner``, deleted if the block (or the writing) raises."""
    partial = os.path.join(os.path.dirname(inner), f".sparkdl-{secrets.token_hex(12)}.part")
    try:
        with _create(filesystem, partial) as file:
            file.write(content)
            if _is_local(filesystem):
                file.flush()
                os.fsync(file.fileno())
        yield partial
    except BaseException:
        with contextlib.suppress(Exception):  # the error that brought us here is the one to tell
            filesystem.delete_file(partial)
        raise


def _create(filesystem: Any, inner: str) -> Any:
    """A new file to write to; locally a file or symbolic link that is there already is an error."""
    if _is_local(filesystem):
        return open(inner, "xb")
    return filesystem.open_output_stream(inner)


def _replace(filesystem: Any, source: str, target: str) -> None:
    """Renames over an existing file, also where the system (HDFS, fsspec) does not."""
    from pyarrow import fs

    if _is_local(filesystem):
        os.replace(source, target)
        _sync_folder(os.path.dirname(target))
        return
    if filesystem.get_file_info(target).type == fs.FileType.File:
        with contextlib.suppress(FileNotFoundError):  # another writer was there first
            filesystem.delete_file(target)
    filesystem.move(source, target)


def _sync_folder(folder: str) -> None:
    """Writes the folder's entries to disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_local(filesystem: Any) -> bool:
    from pyarrow import fs

    return isinstance(filesystem, fs.LocalFileSystem)


def _resolve(path: str) -> tuple[Any, str]:
    """The pyarrow file system of a path or URI, and the path inside it."""
    from pyarrow import fs

    text = os.fspath(path)
    if "://" not in text:
        return fs.LocalFileSystem(), os.path.abspath(text)
    try:
        filesystem, inner = fs.FileSystem.from_uri(text)
        return filesystem, inner
    except Exception as first:
        try:
            import fsspec

            other, inner = fsspec.core.url_to_fs(text)
            return fs.PyFileSystem(fs.FSSpecHandler(other)), inner
        except Exception as error:
            raise ResourceError(
                f"no file system for {text!r}",
                expected="a local path, or a URI that pyarrow or fsspec knows",
                received=f"{type(first).__name__}: {first}",
                hint=f"install the fsspec driver for {text.split('://', 1)[0]}://",
            ) from error


@contextlib.contextmanager
def _explained(verb: str, path: str) -> Iterator[None]:
    """Raises what a file system raises as ResourceError."""
    try:
        yield
    except (OSError, ValueError) as error:
        do = "write to" if verb == "written" else "read"
        raise ResourceError(
            f"{path!r} cannot be {verb}",
            expected=f"a place that this process can {do}",
            received=f"{type(error).__name__}: {error}",
        ) from error
