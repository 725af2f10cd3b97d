"""The center as it was at one moment, read piece by piece, copied only if it changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from sparkdl.transport.frames import ByteArray

PIECE_BYTES = 4 << 20


class Reading:
    """One reply's view of the center.

    Most pulls meet no commit while they are sent: they read the center itself, and no copy is
    made. A commit that comes meanwhile first calls :meth:`preserve`, which moves what is still
    unread into the reader's own buffer (the buffer of its connection, idle by then).

    Args:
        source: The center's bytes.
        spare: Gives the reader's own buffer, of the same size or larger.
    """

    def __init__(self, source: ByteArray, spare: Callable[[], ByteArray]) -> None:
        self.nbytes = source.nbytes
        self._source = source
        self._spare = spare
        self._position = 0
        self._lock = threading.Lock()
        self._own = False

    @property
    def done(self) -> bool:
        """Whether nothing is left to preserve."""
        return self._own or self._position == self.nbytes

    def read(self, consume: Callable[[memoryview], int]) -> bool:
        """Hands ``consume`` the next piece; True when all is consumed.

        Args:
            consume: Takes a piece and returns how many of its bytes it took. It must not block:
                commits wait for it.
        """
        with self._lock:
            end = min(self._position + PIECE_BYTES, self.nbytes)
            self._position += consume(self._source[self._position : end].data)
            return self._position == self.nbytes

    def copy_into(self, target: ByteArray) -> None:
        """Copies all that is unread to its place in ``target``."""
        while True:
            with self._lock:
                start, end = self._position, min(self._position + PIECE_BYTES, self.nbytes)
                piece = self._source[start:end]
                if piece.ctypes.data != target[start:end].ctypes.data:
                    np.copyto(target[start:end], piece)
                self._position = end
                if end == self.nbytes:
                    return

    def preserve(self) -> None:
        """The center is about to change: keeps what is unread in the reader's own buffer."""
        with self._lock:
            if not self.done:
                own = self._spare()
                rest = slice(self._position, self.nbytes)
                np.copyto(own[rest], self._source[rest])
                self._source, self._own = own, True
