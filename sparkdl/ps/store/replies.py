"""How a center is answered with, and how commits to it are read: replies, change by change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import ENCODABLE, StoreKind
from sparkdl.ps.store.center import Center
from sparkdl.transport.frames import ByteArray, Flag, FrameLimits, Kind, Message
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


class CenterReplies:
    """Reads the commits to a center, and answers with it.

    A commit is applied from its connection's buffer. A reply reads the center itself; only if a
    commit changes the center meanwhile is the unread rest copied, into that same buffer. So replies
    are consistent, and memory stays at center + rule state + one buffer each.

    Args:
        center: The weights and their rule.
        compression: What workers may send encoded; None refuses encoded commits.
        buffer: Gives the buffer of a connection.
    """

    def __init__(
        self,
        center: Center,
        limits: FrameLimits,
        compression: Compression | None,
        buffer: Callable[[int], ByteArray],
    ) -> None:
        self._center, self._limits, self._compression = center, limits, compression
        self._buffer = buffer
        self._holdings = None if compression is None else Holdings(compression)
        self._readings: dict[int, Reading] = {}

    def forget(self, rank: int) -> None:
        """Frees what is kept for a worker that is dead or done."""
        if self._holdings is not None:
            self._holdings.forget(rank)

    def disconnect(self, connection: int) -> None:
        """Nobody reads this connection's reply any more."""
        self._readings.pop(connection, None)

    def decoded(self, connection: int, message: Message) -> Message:
        """A commit with its values instead of their payload; needs no lock.

        The values take the payload's place in the connection's buffer, so that a commit costs a
        copy of its few bytes, and no second buffer.
        """
        if not (message.flags & Flag.ENCODED and message.kind in ENCODABLE):
            return message
        if self._compression is None:
            raise ProtocolError(
                "an encoded commit in a run without compression", expected="float32 values",
                received="a codec's payload",
            )  # fmt: skip
        raw = self._buffer(connection)[: self._limits.dense_bytes]
        self._compression.commits.decode(message.content.copy(), self._limits.dense(raw))
        return replace(message, body=raw)

    def values(self, message: Message) -> FloatArray:
        """The values of a commit, in the buffer that they arrived in.

        Raises:
            ProtocolError: It does not hold the whole flat buffer.
        """
        body = message.body
        if body is None and not self._limits.dense_bytes:  # the values lie on other servers
            return np.empty(0, np.float32)
        whole = body is not None and body.nbytes == self._limits.dense_bytes
        if body is None or not whole or message.flags & Flag.SLICED:
            raise ProtocolError(
                f"a {message.kind.name} frame without the whole flat buffer",
                expected=f"{self._limits.dense_bytes} bytes of weights",
                received=f"{message.body_bytes} bytes, {message.flags!r}",
            )
        return self._limits.dense(body)

    def weights(self, connection: int, request: Message) -> Message:
        """OK for a push; the center as it is now, or its encoded change, for a pull."""
        if request.kind is StoreKind.PUSH or not self._limits.dense_bytes:
            return Message(Kind.OK, sequence=request.sequence)
        encoded = request.flags & Flag.ENCODED and request.rank >= 0
        if self._holdings is not None and encoded and not self._center.on_workers:
            return self._holdings.answer(request, self._center.weights)
        reading = Reading(self._center.weights.view(np.uint8), lambda: self._buffer(connection))
        if not self._center.rule.lock_free:  # Hogwild! readers take what they find
            self._readings[connection] = reading
        return Message(StoreKind.WEIGHTS, sequence=request.sequence, reading=reading)

    def result(self, request: Message, rows: int) -> Message:
        """The result of a round, sent from where it lies: it cannot change before the next commit
        of the rank that asks (or its death, and then nobody reads it)."""
        reply = Message(StoreKind.WEIGHTS, sequence=request.sequence, rows=rows)
        if self._holdings is None or not request.flags & Flag.ENCODED:
            reply.body = self._center.result.view(np.uint8)
        elif self._center.on_workers:
            reply.flags, reply.body = Flag.ENCODED, self._center.encoded
        else:
            reply = self._holdings.answer(request, self._center.weights)
            reply.rows = rows
        return reply

    def preserve(self) -> None:
        """Before the center changes: whoever still reads it keeps what it was."""
        for reading in self._readings.values():
            reading.preserve()
        self._readings.clear()
