"""The center: how commits and rounds change it, and the base of the stores that answer with it."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkdl.codecs import Compression, Sections
from sparkdl.coordinator.group import Group, Store, Work, Worker
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import COMMITS, ENCODABLE, StoreKind, limits_of
from sparkdl.ps.store.rounds import Round
from sparkdl.rules.rule import Commit, Rule, State
from sparkdl.training.changes import VariableChanges
from sparkdl.training.slices import Slices, join_slices, pack
from sparkdl.transport.frames import ByteArray, Flag, FrameLimits, Kind, Message
from sparkdl.weights import FloatArray, Layout


class Center:
    """The flat weights on the server and the rule that changes them.

    The rule sees the trained section; the averaged section is averaged here, never summed.
    For a blocking rule on gradients the workers hold the weights: ``weights`` is then their
    last snapshot, and ``result`` the mean gradient of the last round (``encoded``: as a codec's
    payload, where there is one; ``sliced``: as it is sent where gradients of some variables are
    slices).

    Args:
        layout: What is where in the buffer.
        weights: The initial center; taken as it is, not copied, and written to.
        rule: How commits change it.
        compression: The run's compression, applied to a round's mean gradient once for all ranks,
            so that they stay in step, however each of them is connected.
    """

    def __init__(
        self,
        layout: Layout,
        weights: FloatArray,
        rule: Rule,
        compression: Compression | None = None,
    ) -> None:
        layout.check(weights)
        self._layout = layout
        self._trained = slice(0, layout.trained_size)
        self._averaged = slice(layout.trained_size, layout.size)
        self.weights = weights
        self.rule = rule
        self.on_workers = rule.blocking and rule.payload == "gradient"
        self.result = np.zeros_like(weights) if self.on_workers else weights
        self._state: State = rule.init(weights[self._trained])
        self._sections: Sections | None = None
        self.encoded: ByteArray = np.empty(0, np.uint8)
        self.sliced: ByteArray | None = None
        if compression is not None and self.on_workers:
            self._sections = compression.replies
            self._compressor = self._sections.codec.compressor(layout.trained_size, seed=0)

    def require_on_workers(self) -> None:
        """Refuses a snapshot where this server itself holds the weights."""
        if not self.on_workers:
            raise ProtocolError(
                "SNAPSHOT is for rules that wait and take gradients",
                expected="a rule whose workers hold the weights",
                received=f"rule {self.rule.name!r}",
                hint="with other rules the server itself holds the weights",
            )

    def apply(self, values: FloatArray, commit: Commit) -> None:
        """One asynchronous commit. The caller holds the lock, unless the rule needs none."""
        weights = self.weights[self._trained]
        self.rule.update(weights, values[self._trained], self._state, commit, weights)
        if self._averaged.start == self._averaged.stop:
            return
        share = np.float32(1.0 / commit.num_workers)
        statistics, sent = self.weights[self._averaged], values[self._averaged]
        if self.rule.payload == "delta":
            statistics += sent * share
        else:
            statistics += (sent - statistics) * share

    def pulled(self, rank: int) -> None:
        """Tells the rule that ``rank`` gets the center as it is now."""
        self.rule.pulled(self.weights[self._trained], self._state, rank)

    def apply_round(self, round_: Round, clock: int) -> None:
        """The row-weighted mean of a round; leaves ``result`` as what all ranks get back."""
        rows = round_.rows
        if rows == 0:
            return
        payloads = sorted(round_.payloads.items())
        messages: list[Message] = [payload.message for _, payload in payloads]
        contributions = round_.contributions
        if contributions[0].slices:
            parts = [(p.message.rows, p.slices) for p in contributions]
            self._apply_slices(round_, join_slices(parts))
            return
        self.sliced = None
        if self.on_workers and self.rule.replies_mean:
            round_.mean(self.result)
            self._encode_result()
            return
        mean = payloads[0][1].values  # reduced in place: nobody needs this payload afterwards
        round_.mean(mean)
        commit = Commit(
            worker=payloads[0][0], num_workers=len(payloads), clock=clock, pulled_clock=clock,
            batches=max(m.batches for m in messages), rows=rows,
            learning_rate=_number(max(m.learning_rate for m in messages)),
        )  # fmt: skip
        result = self.result[self._trained]
        self.rule.update(result, mean[self._trained], self._state, commit, result)
        if self.on_workers:
            self.result[self._averaged] = mean[self._averaged]
            self._encode_result()
        else:
            self.weights[self._averaged] += mean[self._averaged]

    def _apply_slices(self, round_: Round, joined: list[Slices]) -> None:
        """A round in which the gradients of some variables are slices; the reply is the mean."""
        mean = round_.contributions[0].values  # reduced in place: nobody needs it afterwards
        round_.mean(mean)
        if self._sections is not None:
            places = [s.place for s in joined]
            self._layout.copy_without(places, self.result, mean, back=True)
            self._encode_result()
            self._layout.copy_without(places, self.result, mean)
            self.encoded = pack(self.encoded, joined)
        self.sliced = pack(mean.view(np.uint8), joined)

    def slices_for(self, request: Message) -> ByteArray:
        """``sliced`` as the rank asks for it, encoded or not; empty where it is None."""
        if self.sliced is None:
            return np.empty(0, np.uint8)
        return self.encoded if request.flags & Flag.ENCODED else self.sliced

    def _encode_result(self) -> None:
        if self._sections is None:
            return
        gradient = self.result[self._trained]
        payload = self._compressor.encode(gradient)
        self._sections.codec.decode(payload, gradient)
        self.encoded = self._sections.join(self.result[self._averaged], payload)


def _number(value: float) -> float:
    return value if value == value else 0.0  # NaN stands for none


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
            if not self._own and self._position < self.nbytes:
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

    def take(
        self, worker: Worker, message: Message, values: FloatArray, clock: int, num_workers: int
    ) -> Commit:
        """Counts a commit, ``clock`` having been counted, and applies it.

        With ``lock_free`` the caller applies it, when it has given the lock back.
        """
        commit = Commit(
            worker=worker.rank, num_workers=num_workers, clock=clock,
            pulled_clock=worker.pulled_clock, batches=message.batches, rows=message.rows,
            learning_rate=_number(message.learning_rate),
        )  # fmt: skip
        if not self._center.rule.lock_free:
            self.preserve()
            self._center.apply(values, commit)
        worker.staleness_sum += commit.staleness
        worker.staleness_max = max(worker.staleness_max, commit.staleness)
        worker.advance(message)
        if message.kind is StoreKind.PUSH_PULL:
            worker.pulled_clock = clock + 1
        return commit

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


class ParameterStore(Store, abc.ABC):
    """Weights that all workers share, changed by a rule; a store of a coordinator.

    How commits are read and pulls are answered without copies: :class:`CenterReplies`.

    Args:
        center: Initial weights; taken over, not copied.
        rule: How commits change the center.
        compression: What workers may send encoded; None refuses encoded commits.
    """

    kinds = frozenset({StoreKind.PULL, StoreKind.PUSH, StoreKind.PUSH_PULL, StoreKind.SNAPSHOT})

    def __init__(
        self, layout: Layout, center: FloatArray, rule: Rule, compression: Compression | None = None
    ) -> None:
        self.limits = limits_of(layout, compression)
        self._rule = rule
        self._compression = compression
        self._center = Center(layout, center, rule, compression)

    def attach(self, group: Group) -> None:
        super().attach(group)
        self._replies = CenterReplies(self._center, self.limits, self._compression, group.buffer)

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
                expected=f"{self.limits.dense_bytes} bytes of weights", received=f"{size} bytes",
                hint="does the model build other layers on the executors?",
            )  # fmt: skip

    def welcome(self) -> Mapping[str, Any]:
        """The rule's name and what it takes."""
        return {"rule": self._rule.name, "payload": self._rule.payload}

    def leave(self, worker: Worker) -> None:
        self._replies.forget(worker.rank)

    def disconnect(self, connection: int) -> None:
        self._replies.disconnect(connection)

    def decoded(self, connection: int, message: Message) -> Message:
        """A commit with its values instead of their payload; needs no lock."""
        return self._replies.decoded(connection, message)

    def receive(self, connection: int, message: Message) -> Work | None:
        if message.kind in COMMITS:
            return self._commit(connection, message, self._group.identify(connection, message))
        if message.kind is StoreKind.SNAPSHOT:
            self._take_snapshot(connection, message, self._group.identify(connection, message))
            return None
        worker = self._group.identify(connection, message) if message.rank >= 0 else None
        self._pull(connection, message, worker)
        return None

    def write(self, changes: VariableChanges) -> None:
        if changes.offsets and self.limits.dense_bytes:
            self._replies.preserve()
            changes.write_into(self._center.weights)

    @abc.abstractmethod
    def _commit(self, connection: int, message: Message, worker: Worker) -> Work | None:
        """Takes a commit."""

    def _take_snapshot(self, connection: int, message: Message, worker: Worker) -> None:
        self._center.require_on_workers()

    def _pull(self, connection: int, message: Message, worker: Worker | None) -> None:
        """Answers a pull, of the driver where ``worker`` is None."""
        group = self._group
        if worker is not None:
            worker.pulled_clock = group.clock
            self._center.pulled(worker.rank)
        group.answer(connection, self._replies.weights(connection, message), worker)
