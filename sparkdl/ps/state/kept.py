"""State that a worker leaves with the server for the driver: a checkpoint in memory."""

from __future__ import annotations

import numpy as np

from sparkdl.errors import ProtocolError
from sparkdl.ps.state.rounds import integer_of
from sparkdl.transport.frames import ByteArray, Message


class KeptState:
    """The last whole state that a worker stored, as bytes that the server does not look into.

    A new one replaces it only once all of its chunks have come, so that a worker that dies in the
    middle leaves the former.

    Args:
        max_bytes: Bound of one state.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._coming: dict[tuple[int, int], ByteArray] = {}
        self._blob: ByteArray = np.empty(0, np.uint8)
        self.epoch = -1

    def put(self, message: Message) -> None:
        """Takes one chunk.

        Raises:
            ProtocolError: Too large, or a chunk out of order.
        """
        offset, total = integer_of(message, "offset"), integer_of(message, "total")
        chunk = np.empty(0, np.uint8) if message.body is None else message.body
        if not 0 < total <= self._max_bytes:
            raise ProtocolError(
                "the state to keep is too large or empty",
                expected=f"1 .. {self._max_bytes} bytes",
                received=f"{total} bytes",
            )
        sender = (message.rank, message.attempt)
        if offset == 0:
            self._coming = {sender: np.empty(total, np.uint8)}
        coming = self._coming.get(sender)
        if coming is None or not 0 <= offset <= coming.size - chunk.size:
            raise ProtocolError(
                "a chunk of state to keep came out of order",
                received=f"offset {offset}, {chunk.size} bytes, total {total}",
            )
        coming[offset : offset + chunk.size] = chunk
        if offset + chunk.size == coming.size:
            self._coming, self._blob, self.epoch = {}, coming, message.epoch

    def get(self, offset: int, limit: int) -> tuple[ByteArray, int]:
        """One chunk from ``offset`` on, and the whole state's size (0: none is kept)."""
        if not 0 <= offset <= self._blob.size:
            raise ProtocolError("a read of state outside its bounds", received=f"offset {offset}")
        return self._blob[offset : offset + limit], self._blob.size
