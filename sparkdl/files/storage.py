"""Files anywhere: which file system a path belongs to, and what is done there.

``file:`` is this machine. What else a path may say is decided by those who were plugged in
(``sparkdl.spark`` is: Hadoop's file systems, where a session runs) and then by pyarrow and fsspec.
ResourceError says what could not be found, read or written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from sparkdl.errors import ResourceError, SparkDLError
from sparkdl.files.file_system import FileSystem, LocalFileSystem, open_uri

Finder = Callable[[str, str | None], FileSystem | None]
"""From a path and its scheme (None without one) to its file system; None for somebody else's."""

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/")
_finders: list[Finder] = []


def plug_in(finder: Finder) -> None:
    """Asks ``finder`` for the file systems of all paths but those with ``file:``."""
    if finder not in _finders:
        _finders.append(finder)


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file whole or not at all, and the folders above it.

    Several threads or machines that write one path do not mix their contents. On a local disk the
    content is there before the name is.
    """
    file_system, inner = _resolve(path)
    with explained("written", path):
        file_system.write(inner, content)


def read_bytes(path: str, at_most: int | None = None) -> bytes:
    """Reads a whole file.

    Args:
        at_most: More bytes than that are an error.

    Raises:
        ResourceError: The path cannot be read, or the file is longer than ``at_most``.
    """
    file_system, inner = _resolve(path)
    with explained("read", path):
        content = file_system.read(inner, None if at_most is None else at_most + 1)
    if at_most is not None and len(content) > at_most:
        raise ResourceError(
            f"{path!r} is too long", expected=f"at most {at_most} bytes", received="more"
        )
    return content


def read_start(path: str, at_most: int) -> bytes:
    """The first ``at_most`` bytes of a file, or all of it."""
    file_system, inner = _resolve(path)
    with explained("read", path):
        return file_system.read(inner, at_most)


def create_local(path: str) -> BinaryIO | None:
    """A new file, open for writing, with the folders above it; None if ``path`` is not local.

    Raises:
        ResourceError: The file is there already, or cannot be written.
    """
    file_system, inner = _resolve(path)
    if not isinstance(file_system, LocalFileSystem):
        return None
    with explained("written", path):
        os.makedirs(os.path.dirname(inner), exist_ok=True)
        return open(inner, "xb")


def path_on_disk(path: str) -> str | None:
    """The place of ``path`` on this machine's disks; None if it belongs elsewhere."""
    file_system, inner = _resolve(path)
    return inner if isinstance(file_system, LocalFileSystem) else None


def list_files(folder: str, ending: str) -> list[str]:
    """Paths of the files right in ``folder`` whose names have ``ending``, sorted; or ``[folder]``
    if it is a file itself.
    """
    return list(sizes_of_files(folder, ending))


def sizes_of_files(folder: str, ending: str) -> dict[str, int | None]:
    """The sizes of the files of :func:`list_files` in bytes; None where it is not known."""
    file_system, inner = _resolve(folder)
    with explained("read", folder):
        if file_system.find(inner) == "file":
            return {folder: None}
        files = file_system.files_in(inner)
    top = folder.rstrip("/")
    return {f"{top}/{file.name}": file.size_bytes for file in files if file.name.endswith(ending)}


def exists(path: str) -> bool:
    file_system, inner = _resolve(path)
    with explained("read", path):
        return file_system.find(inner) is not None


def require_plain(path: str) -> None:
    """Returns if what is written to ``path`` is a file that other programs read."""
    file_system, _ = _resolve(path)
    if not file_system.plain:
        raise ResourceError(
            f"{path!r} would be no file that other programs can read",
            expected="a path of this machine ('file:/...'), or a session on Spark's driver",
            received="Spark Connect, over which a file becomes a folder with its content in rows",
            hint="write to 'file:/...' and copy the result",
        )


def check_writable(path: str) -> None:
    """Tries to write next to ``path``, so that a long fit does not end in a full disk's error."""
    file_system, inner = _resolve(path)
    with explained("written", path):
        file_system.check_writable(inner)


def delete(path: str) -> None:
    """Deletes a file if it is there."""
    file_system, inner = _resolve(path)
    with contextlib.suppress(OSError):
        file_system.delete(inner)


def delete_partial(folder: str, older_than_s: float) -> None:
    """Deletes the files that :func:`write_bytes` began right in ``folder`` and did not end, because
    its process was killed; does nothing where that cannot be done.

    Args:
        folder: A path or URI.
        older_than_s: Younger ones may still be written.
    """
    file_system, inner = _resolve(folder)
    with contextlib.suppress(Exception):  # the next one that opens the folder tries again
        file_system.delete_partial(inner, older_than_s)


def _resolve(path: str) -> tuple[FileSystem, str]:
    text = os.fspath(path)
    match = SCHEME.match(text)
    scheme = None if match is None else match[1].lower()
    if scheme == "file":
        return LocalFileSystem(), local_path(text)
    with explained("read", path):
        for finder in _finders:
            found = finder(text, scheme)
            if found is not None:
                return found, text
    if scheme is None:
        return LocalFileSystem(), os.path.abspath(text)
    if not text.startswith("//", len(scheme) + 1):  # 'dbfs:/a' is Hadoop's way to write 'dbfs:///a'
        text = f"{scheme}://{text[len(scheme) + 1 :]}"
    return open_uri(text, scheme)


def local_path(uri: str) -> str:
    """The path in ``file:/a``, ``file:///a`` or ``file://localhost/a``.

    Its letters mean themselves, as to Spark: ``%20`` is no blank.

    Raises:
        ResourceError: It names another machine.
    """
    rest = uri[len("file:") :]
    machine = ""
    if rest.startswith("//"):
        machine, _, rest = rest[2:].partition("/")
    if machine not in ("", "localhost"):
        raise ResourceError(
            f"{uri!r} names the machine {machine!r}",
            expected="a path of this machine: file:///folder/file", received=f"file://{machine}",
            hint="three slashes after 'file:'",
        )  # fmt: skip
    return os.path.abspath("/" + rest.lstrip("/"))


@contextlib.contextmanager
def explained(verb: str, path: str) -> Iterator[None]:
    """Raises what a file system raises as ResourceError: fsspec's raise errors of any kind."""
    try:
        yield
    except SparkDLError:
        raise
    except Exception as error:
        do = "write to" if verb == "written" else "read"
        raise ResourceError(
            f"{path!r} cannot be {verb}", expected=f"a place that this process can {do}",
            received=f"{type(error).__name__}: {error}",
        ) from error  # fmt: skip
