"""A file that grows while a fit runs: readable at any time, on any file system."""

from __future__ import annotations

from typing import BinaryIO

from sparkdl.files.storage import create_local, write_bytes
from sparkdl.process.closing import Closing


class GrowingFile(Closing):
    """Appends to a new file.

    A local file has what was appended after each :meth:`flush`. Object stores cannot append: there
    the content is kept in memory, and the file written anew, whole, with each ``flush(whole=True)``
    and at the end.

    Args:
        path: A path or URI; the folders above it are made.

    Raises:
        ResourceError: The file is there already, or cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = create_local(path)
        self._content = bytearray()
        self._closed = False
        if self._file is None:
            write_bytes(path, b"")

    def append(self, content: bytes) -> None:
        """Adds to the end."""
        if self._file is None:
            self._content += content
        else:
            self._file.write(content)

    def flush(self, *, whole: bool = False) -> None:
        """Makes what was appended readable: in an object store only with ``whole``, which costs the
        time to write all of it."""
        if self._file is not None:
            self._file.flush()
        elif whole:
            write_bytes(self._path, bytes(self._content))

    def close(self) -> None:
        """Makes all readable."""
        if self._closed:
            return
        self._closed = True
        self.flush(whole=True)
        if self._file is not None:
            self._file.close()
