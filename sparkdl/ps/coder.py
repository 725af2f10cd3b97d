"""A worker's end of a compressed exchange: encodes its commits, decodes the replies."""

from __future__ import annotations

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import ByteArray, Flag, Message
from sparkdl.weights import FloatArray


class Coder:
    """The codec's memory on one worker: its error feedback, and the center as it has it.

    A commit is encoded once, whatever happens to the connection: what is sent again are the same
    bytes, so that the error feedback stays what it is. It ends with the task's attempt: what was
    not sent yet is then lost, as are the steps since the last commit.

    Args:
        compression: Of the run.
        rank, attempt: Seed the draws of random codecs.
    """

    def __init__(self, compression: Compression, rank: int, attempt: int) -> None:
        seed = int(np.random.SeedSequence((rank, attempt)).generate_state(1)[0])
        self._compression = compression
        self._compressor = compression.compressor(seed)
        self._trained = slice(0, compression.layout.trained_size)
        self._averaged = slice(compression.layout.trained_size, compression.layout.size)
        self._held: FloatArray | None = None
        self.version = -1

    @property
    def residual(self) -> FloatArray | None:
        """The values that are still to be sent; None for a codec that keeps nothing back."""
        return self._compressor.residual

    def encode(self, flat: FloatArray, rows: int) -> ByteArray:
        """The payload of a commit; one without rows stands for nothing, and changes nothing."""
        if rows:
            payload = self._compressor.encode(flat[self._trained])
        else:
            payload = self._compression.codec.encode(np.zeros_like(flat[self._trained]))
        return self._compression.commits.join(flat[self._averaged], payload)

    def decode(self, reply: Message, flat: FloatArray) -> None:
        """Makes ``flat``, where the reply's body lies, the weights or gradient that it stands for.

        Raises:
            ProtocolError: The body cannot come from the server of this run.
        """
        replies = self._compression.replies
        if not reply.flags & Flag.ENCODED:
            self._held, self.version = flat.copy(), 0
            return
        body = np.empty(0, np.uint8) if reply.body is None else reply.body.copy()
        if not reply.flags & Flag.CHANGE:
            if reply.rows:
                replies.decode(body, flat)
            return
        if self._held is None:
            raise ProtocolError(
                "a change of the center for a worker that holds none",
                expected="the whole center first",
                received="a change of it",
            )
        replies.decode(body, flat)
        self._held[self._trained] += flat[self._trained]
        self._held[self._averaged] = flat[self._averaged]
        np.copyto(flat, self._held)
        self.version += 1
