"""Parts of a blocking rule: one round's payloads, and the state that a joiner waits for."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.errors import ProtocolError
from sparkdl.ps.state.records import Payload
from sparkdl.transport.frames import ByteArray, Message
from sparkdl.weights import FloatArray

BLOCK = 1 << 16
"""Elements reduced at a time: two blocks fit the second-level cache."""


class Round:
    """The payloads of one round, left in the buffers they arrived in."""

    def __init__(self) -> None:
        self.payloads: dict[int, Payload] = {}

    @property
    def rows(self) -> int:
        return sum(p.message.rows for p in self.payloads.values())

    def mean(self, out: FloatArray) -> None:
        """Writes the row-weighted mean into ``out``: ranks in order, so bit for bit repeatable.

        Ranks with 0 rows contribute nothing. ``out`` may be one of the payloads: a block is
        written only after it was read from all. Only two blocks are allocated.
        """
        parts = [
            (p.values, p.message.rows) for _, p in sorted(self.payloads.items()) if p.message.rows
        ]
        total = float(sum(rows for _, rows in parts))
        if len(parts) == 1:
            if parts[0][0] is not out:
                np.copyto(out, parts[0][0])
            return
        weights = [np.float32(rows / total) for _, rows in parts]
        scratch = np.empty((2, min(BLOCK, out.size)), np.float32)
        for start in range(0, out.size, BLOCK):
            block = slice(start, min(start + BLOCK, out.size))
            total_block, part = scratch[:, : block.stop - block.start]
            np.multiply(parts[0][0][block], weights[0], out=total_block)
            for (values, _), weight in zip(parts[1:], weights[1:], strict=True):
                np.multiply(values[block], weight, out=part)
                total_block += part
            out[block] = total_block


class StateTransfer:
    """Weights and optimizer state on their way from a live rank to a joiner, in chunks.

    Args:
        max_bytes: Bound of the whole state.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._blob: ByteArray | None = None
        self._filled = 0
        self.uploader: int | None = None
        self.position = (0, 0)
        self.readers: set[int] = set()

    def put(self, message: Message) -> bool:
        """Takes one chunk; True when the state is whole.

        Raises:
            ProtocolError: Too large, or a chunk out of order.
        """
        offset, total = integer_of(message, "offset"), integer_of(message, "total")
        chunk = np.empty(0, np.uint8) if message.body is None else message.body
        if not 0 < total <= self.max_bytes:
            raise ProtocolError(
                "the state for a joiner is too large or empty",
                expected=f"1 .. {self.max_bytes} bytes",
                received=f"{total} bytes",
                hint="raise max_state_bytes",
            )
        if offset == 0:
            self._blob, self._filled = np.empty(total, np.uint8), 0
        if self._blob is None or offset + chunk.size > self._blob.size or offset > self._filled:
            raise ProtocolError(
                "a chunk of state came out of order",
                expected=f"offset {self._filled}",
                received=f"offset {offset}, {chunk.size} bytes, total {total}",
            )
        self._blob[offset : offset + chunk.size] = chunk
        self._filled = max(self._filled, offset + chunk.size)
        if self._filled < self._blob.size:
            return False
        self.uploader, self.position = None, (message.epoch, message.batch)
        return True

    def get(self, offset: int, limit: int) -> tuple[ByteArray, int]:
        """One chunk from ``offset`` on, and the whole state's size.

        Raises:
            ProtocolError: There is no state, or the offset lies outside it.
        """
        if self._blob is None or self._filled < self._blob.size:
            raise ProtocolError("no state is stored for a joiner", expected="STATE_PUT first")
        if not 0 <= offset < self._blob.size:
            raise ProtocolError("a read of state outside its bounds", received=f"offset {offset}")
        return self._blob[offset : offset + limit], self._blob.size

    def forget(self, rank: int) -> None:
        """``rank`` has read the state, or is dead; frees it after the last reader."""
        self.readers.discard(rank)
        if not self.readers and self.uploader is None:
            self._blob = None


def integer_of(message: Message, key: str) -> int:
    """The int ``key`` of a message's meta; refuses a message without it."""
    value: Any = message.meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ProtocolError(
            f"a {message.kind.name} frame lacks {key!r}", expected="an int", received=repr(value)
        )
    return value
