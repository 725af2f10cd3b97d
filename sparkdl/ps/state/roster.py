"""Who takes part in a run, who waits for what, and how each request gets its one reply."""

from __future__ import annotations

import math
import threading
import traceback

import numpy as np

from sparkdl.errors import ProtocolError, SparkDLError, TransportError, WorkerError
from sparkdl.ps.codecs import Compression
from sparkdl.ps.rules.rule import Rule
from sparkdl.ps.state.center import Center
from sparkdl.ps.state.holdings import Holdings
from sparkdl.ps.state.kept import KeptState
from sparkdl.ps.state.reading import Reading
from sparkdl.ps.state.records import Settings, Wait, Worker
from sparkdl.ps.state.rounds import Round, StateTransfer
from sparkdl.ps.state.telemetry import Telemetry
from sparkdl.transport.frames import ByteArray, Flag, Kind, Limits, Message, error_to_meta
from sparkdl.weights import FloatArray, Layout

Replies = list[tuple[int, Message]]


class Roster:
    """Workers, connections, buffers and deferred replies; the ground that the machine stands on."""

    def __init__(
        self,
        layout: Layout,
        center: FloatArray,
        rule: Rule,
        settings: Settings,
        compression: Compression | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.limits = Limits.of(
            layout, encoded_bytes=0 if compression is None else compression.max_bytes
        )
        self.settings = settings
        self.clock = 0
        self.rounds = 0
        self.bytes_in = self.bytes_out = 0
        self._compression = compression
        self._center = Center(layout, center, rule, compression)
        self._holdings = None if compression is None else Holdings(compression)
        self._rule = rule
        self._gated = type(rule).may_continue is not Rule.may_continue
        self._workers: dict[int, Worker] = {}
        self._buffers: dict[int, ByteArray] = {}
        self._mailboxes: set[int] = set()
        self._waits: dict[int, Wait] = {}
        self._readings: dict[int, Reading] = {}
        self._outbox: Replies = []
        self._now = 0.0
        self._telemetry = Telemetry()
        self._round = Round()
        self._round_rows = 0
        self._transfer = StateTransfer(
            settings.max_state_bytes
            if settings.max_state_bytes is not None
            else 8 * layout.size_bytes + (64 << 20)
        )
        self._kept = KeptState(self._transfer.max_bytes)
        self._started = not (rule.blocking or self._gated)
        self._gathered = settings.gather <= 1
        self._cohort_done = False
        self._position = (0, 0)
        self._snapshot_position = (0, 0)
        self._released_epoch = -1
        self._driver_seen = 0.0
        self._failure: WorkerError | None = None
        self._wish = (False, math.nan)  # stop, learning rate: what the driver asked for
        self._shown = self._wish  # what workers are told; latched per round in blocking rules

    def buffer(self, connection: int) -> ByteArray:
        """This connection's buffer, allocated at the first call."""
        with self.lock:
            if connection not in self._buffers:
                self._buffers[connection] = self.limits.allocate()
            return self._buffers[connection]

    def attach(self, connection: int, buffer: ByteArray) -> None:
        """Makes ``buffer`` (a shared-memory mailbox) this connection's."""
        with self.lock:
            self._buffers[connection] = buffer
            self._mailboxes.add(connection)

    def _flush(self) -> Replies:
        replies, self._outbox = self._outbox, []
        return replies

    def _answer(self, connection: int, reply: Message, worker: Worker | None = None) -> None:
        self._waits.pop(connection, None)
        self._stamp(reply, worker)
        self._outbox.append((connection, reply))

    def _refuse(self, connection: int, error: SparkDLError) -> None:
        self._answer(connection, Message(Kind.ERROR, meta=error_to_meta(error)))

    def _stamp(self, reply: Message, worker: Worker | None) -> None:
        """Fills what every reply carries: clock, stop, abort, learning rate, lead."""
        stop, learning_rate = self._shown
        reply.clock, reply.learning_rate = self.clock, learning_rate
        if stop:
            reply.flags |= Flag.STOP
        if self._failure is not None:
            reply.flags |= Flag.ABORT
        if worker is not None:
            reply.rank = worker.rank
            if worker.rank == min((w.rank for w in self._live()), default=worker.rank):
                reply.flags |= Flag.LEAD

    def _weights(self, connection: int, request: Message) -> Message:
        """OK for a push; the center as it is now, or its encoded change, for a pull."""
        if request.kind is Kind.PUSH:
            return Message(Kind.OK, sequence=request.sequence)
        encoded = request.flags & Flag.ENCODED and request.rank >= 0
        if self._holdings is not None and encoded and not self._center.on_workers:
            return self._holdings.answer(request, self._center.weights)
        reading = Reading(self._center.weights.view(np.uint8), lambda: self.buffer(connection))
        if not self._rule.lock_free:  # Hogwild! readers take what they find
            self._readings[connection] = reading
        return Message(Kind.WEIGHTS, sequence=request.sequence, reading=reading)

    def _preserve(self) -> None:
        """Before the center changes: whoever still reads it keeps what it was."""
        for reading in self._readings.values():
            reading.preserve()
        self._readings.clear()

    def _live(self) -> list[Worker]:
        return [w for w in self._workers.values() if w.joined and w.alive]

    def _members(self) -> list[Worker]:
        return sorted((w for w in self._workers.values() if w.member), key=lambda w: w.rank)

    def _waiting(self, reason: str) -> list[tuple[int, Wait]]:
        found = [(c, w) for c, w in self._waits.items() if w.reason == reason]
        return sorted(found, key=lambda item: (item[1].message.rank, item[1].since))

    def _identify(self, connection: int, message: Message) -> Worker:
        """The worker that sent ``message``, bound to this connection; refuses strangers."""
        worker = self._workers.get(message.rank)
        if worker is None or worker.attempt is None:
            raise ProtocolError(
                f"rank {message.rank} sent {message.kind.name} before HELLO",
                expected="HELLO first",
            )
        if message.attempt in worker.superseded:
            raise TransportError(
                f"attempt {message.attempt} of rank {message.rank} is superseded",
                expected=f"frames of attempt {worker.attempt}",
                received=f"{message.kind.name} of attempt {message.attempt}",
                hint="the task was retried elsewhere; this one can end",
            )
        if message.attempt != worker.attempt:
            raise ProtocolError(
                f"attempt {message.attempt} of rank {message.rank} sent {message.kind.name} "
                "before HELLO",
                expected="HELLO first",
            )
        if self._failure is not None:
            raise self._failure
        self._bind(connection, message, worker)
        return worker

    def _bind(self, connection: int, message: Message, worker: Worker) -> None:
        """Makes ``connection`` the worker's; an older one of it gets no reply to wait for."""
        old = worker.connection
        worker.bind(connection, message, self._now)
        if old is None or old == connection:
            return
        if old not in self._mailboxes:  # over http nobody tells when a connection is gone
            self._buffers.pop(old, None)
        if old in self._waits:
            self._refuse(old, TransportError("this connection was replaced by a newer one"))

    def _bury(self, worker: Worker) -> None:
        worker.dead, worker.member = True, False
        self._forget_held(worker)
        self._round.payloads.pop(worker.rank, None)
        self._transfer.forget(worker.rank)
        if self._transfer.uploader == worker.rank:
            self._transfer.uploader = None

    def _forget_held(self, worker: Worker) -> None:
        if self._holdings is not None:
            self._holdings.forget(worker.rank)

    def _aborted(self) -> SparkDLError:
        return self._failure or TransportError("the run was aborted")

    def _break(self, error: Exception) -> None:
        """The server's own code, or the user's rule, raised: end the run for everybody."""
        if self._failure is None:
            self._failure = WorkerError(
                -1,
                f"{type(error).__name__}: {error}",
                traceback.format_exc(),
                hint=f"raised on the parameter server by rule {self._rule.name!r}",
            )
