"""Base of both stores of a parameter server: center, pulls, replies that read the center."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.coordinator.store import Store, Work
from sparkdl.coordinator.worker import Worker
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import COMMITS, StoreKind, limits_of
from sparkdl.ps.store.center import Center
from sparkdl.rules.rule import Rule
from sparkdl.training.changes import VariableChanges
from sparkdl.transport.frames import ByteArray, Flag, Kind, Message
from sparkdl.weights import FloatArray, Layout


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


class ParameterStore(Store, abc.ABC):
    """Weights that all workers share, changed by a rule; a store of a coordinator.

    A commit is applied from its connection's buffer. A reply reads the center itself; only if a
    commit changes the center meanwhile is the unread rest copied, into that same buffer. So replies
    are consistent, and memory stays at center + rule state + one buffer each.

    Args:
        layout: Of the flat buffer.
        center: Initial weights; taken over, not copied.
        rule: How commits change the center.
        compression: What workers may send encoded; None refuses encoded commits.
    """

    kinds = frozenset({StoreKind.PULL, StoreKind.PUSH, StoreKind.PUSH_PULL, StoreKind.SNAPSHOT})

    def __init__(
        self,
        layout: Layout,
        center: FloatArray,
        rule: Rule,
        compression: Compression | None = None,
    ) -> None:
        self.limits = limits_of(layout, compression)
        self._rule = rule
        self._compression = compression
        self._center = Center(layout, center, rule, compression)
        self._holdings = None if compression is None else Holdings(compression)
        self._readings: dict[int, Reading] = {}

    @property
    def name(self) -> str:
        """The rule's name."""
        return repr(self._rule.name)

    def check(self, message: Message) -> None:
        """Refuses a worker whose model has another size."""
        size = message.meta.get("weights_bytes", self.limits.dense_bytes)
        if size != self.limits.dense_bytes:
            raise ProtocolError(
                f"rank {message.rank}'s model does not fit the server's layout",
                expected=f"{self.limits.dense_bytes} bytes of weights",
                received=f"{size} bytes",
                hint="does the model build other layers on the executors?",
            )

    def welcome(self) -> Mapping[str, bool | str]:
        """The rule's name and what it takes."""
        return {"rule": self._rule.name, "payload": self._rule.payload}

    def leave(self, worker: Worker) -> None:
        """Forgets what is kept for a worker that is dead or done."""
        if self._holdings is not None:
            self._holdings.forget(worker.rank)

    def disconnect(self, connection: int) -> None:
        """Nobody reads this connection's reply any more."""
        self._readings.pop(connection, None)

    def decoded(self, connection: int, message: Message) -> Message:
        """A commit with its values instead of their payload; needs no lock.

        The values take the payload's place in the connection's buffer, so that a commit costs a
        copy of its few bytes, and no second buffer.
        """
        if not (message.flags & Flag.ENCODED and message.kind in COMMITS):
            return message
        if self._compression is None:
            raise ProtocolError(
                "an encoded commit in a run without compression",
                expected="float32 values",
                received="a codec's payload",
            )
        body = np.empty(0, np.uint8) if message.body is None else message.body.copy()
        raw = self._group.buffer(connection)[: self.limits.dense_bytes]
        self._compression.commits.decode(body, self.limits.dense(raw))
        return replace(message, body=raw)

    def receive(self, connection: int, message: Message) -> Work | None:
        """Answers or defers a request."""
        if message.kind in COMMITS:
            return self._commit(connection, message, self._group.identify(connection, message))
        if message.kind is StoreKind.SNAPSHOT:
            self._take_snapshot(connection, message, self._group.identify(connection, message))
            return None
        worker = self._group.identify(connection, message) if message.rank >= 0 else None
        self._pull(connection, message, worker)
        return None

    def write(self, changes: VariableChanges) -> None:
        """Sets what the driver's callbacks wrote to the weights."""
        if changes.offsets:
            self._preserve()
            changes.write_into(self._center.weights)

    @abc.abstractmethod
    def _commit(self, connection: int, message: Message, worker: Worker) -> Work | None:
        """Takes a commit."""

    def _take_snapshot(self, connection: int, message: Message, worker: Worker) -> None:
        raise ProtocolError(
            "SNAPSHOT is for rules that wait and take gradients",
            expected="a rule whose workers hold the weights",
            received=f"rule {self._rule.name!r}",
            hint="with other rules the server itself holds the weights",
        )

    def _pull(self, connection: int, message: Message, worker: Worker | None) -> None:
        """Answers a pull, of the driver where ``worker`` is None."""
        group = self._group
        if worker is not None:
            worker.pulled_clock = group.clock
            self._center.pulled(worker.rank)
        group.answer(connection, self._weights(connection, message), worker)

    def _values(self, message: Message) -> FloatArray:
        """The values of a commit, in the buffer that they arrived in."""
        body = message.body
        whole = body is not None and body.nbytes == self.limits.dense_bytes
        if body is None or not whole or message.flags & Flag.SLICED:
            raise ProtocolError(
                f"a {message.kind.name} frame without the whole flat buffer",
                expected=f"{self.limits.dense_bytes} bytes of weights",
                received=f"{message.body_bytes} bytes, {message.flags!r}",
            )
        return self.limits.dense(body)

    def _weights(self, connection: int, request: Message) -> Message:
        """OK for a push; the center as it is now, or its encoded change, for a pull."""
        if request.kind is StoreKind.PUSH:
            return Message(Kind.OK, sequence=request.sequence)
        encoded = request.flags & Flag.ENCODED and request.rank >= 0
        if self._holdings is not None and encoded and not self._center.on_workers:
            return self._holdings.answer(request, self._center.weights)
        group = self._group
        reading = Reading(self._center.weights.view(np.uint8), lambda: group.buffer(connection))
        if not self._rule.lock_free:  # Hogwild! readers take what they find
            self._readings[connection] = reading
        return Message(StoreKind.WEIGHTS, sequence=request.sequence, reading=reading)

    def _preserve(self) -> None:
        """Before the center changes: whoever still reads it keeps what it was."""
        for reading in self._readings.values():
            reading.preserve()
        self._readings.clear()
