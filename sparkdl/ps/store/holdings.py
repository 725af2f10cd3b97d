"""The copies of the center that workers hold, so that a reply can be the encoded change of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.ps.kinds import StoreKind
from sparkdl.transport.frames import ByteArray, Flag, Message
from sparkdl.weights import FloatArray


@dataclass
class _Holding:
    """One worker's copy of the center, as it has it after ``version`` encoded replies."""

    weights: FloatArray
    version: int
    last: ByteArray


class Holdings:
    """Answers with the change of what a worker holds, encoded, instead of the whole center.

    ::

        c = C(center - held);   held += D(c)

    on the server, and ``held += D(c)`` on the worker. What the codec loses stays in ``center -
    held`` and is sent with a later reply. A worker counts the replies that it took; one that asks
    with the count before the last gets the last again, so a lost reply is no lost change.

    Memory: one buffer for each worker that asks for encoded replies, and its last reply. Not
    thread-safe for one worker; different workers may be answered at the same time.

    Args:
        compression: Of the run.
    """

    def __init__(self, compression: Compression) -> None:
        self._sections = compression.replies
        self._trained = slice(0, compression.layout.trained_size)
        self._averaged = slice(compression.layout.trained_size, compression.layout.size)
        self._held: dict[int, _Holding] = {}

    def answer(self, request: Message, center: FloatArray) -> Message:
        """The reply to a request with ``ENCODED`` from a worker that gets weights.

        A worker that holds nothing yet, as its ``meta['held']`` says, gets the center as it is.
        """
        holding = self._held.get(request.rank)
        version = request.meta.get("held")
        reply = Message(StoreKind.WEIGHTS, sequence=request.sequence)
        if holding is None or version not in (holding.version, holding.version - 1):
            self._held[request.rank] = holding = _Holding(center.copy(), 0, np.empty(0, np.uint8))
            # Not the center itself: it may change while it is sent.
            reply.body = holding.weights.view(np.uint8)
            return reply
        if version == holding.version:
            self._advance(holding, center)
        reply.flags = Flag.ENCODED | Flag.CHANGE
        reply.body = holding.last
        return reply

    def forget(self, rank: int) -> None:
        """Frees what ``rank`` held: it is gone, or done."""
        self._held.pop(rank, None)

    def _advance(self, holding: _Holding, center: FloatArray) -> None:
        codec = self._sections.codec
        change = center[self._trained] - holding.weights[self._trained]
        payload = codec.encode(change)
        codec.decode(payload, change)
        holding.weights[self._trained] += change
        holding.last = self._sections.join(center[self._averaged], payload)
        holding.version += 1
