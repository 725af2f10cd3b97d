"""The state machine that every transport feeds: ``receive``, ``disconnect``, ``tick``."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkdl.errors import (
    ProtocolError,
    SparkDLError,
    TransportError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.ps.messages import COMMITS, ByteArray, Flag, Kind, Limits, Message, error_to_meta
from sparkdl.ps.rules.base import Commit, Rule
from sparkdl.ps.state.center import Center
from sparkdl.ps.state.reading import Reading
from sparkdl.ps.state.records import Payload, Settings, Wait, Worker
from sparkdl.ps.state.rounds import Round, StateTransfer, integer_of
from sparkdl.ps.state.telemetry import Telemetry, parse_telemetry
from sparkdl.weights import FloatArray, Layout

Replies = list[tuple[int, Message]]


class ServerState:
    """Center, workers and waits of one run; no sockets, no clock of its own.

    A *connection* is an int that a transport chose. It has one outstanding request at a time and
    one buffer, which a commit is applied from. A reply reads the center itself; only if a commit
    changes the center meanwhile is the unread rest copied, into that same buffer. So replies are
    consistent, and memory stays at center + rule state + one buffer each.
    Every request gets exactly one reply, at once or deferred; the replies that became due are
    what ``receive``, ``disconnect`` and ``tick`` return. All three are thread-safe. A rule with
    ``lock_free`` is applied outside the lock, concurrently.

    Args:
        layout: Of the flat buffer.
        center: Initial weights; taken over, not copied.
        rule: How commits change the center.
        settings: Number of workers and time limits.
    """

    def __init__(self, layout: Layout, center: FloatArray, rule: Rule, settings: Settings) -> None:
        self.lock = threading.RLock()
        self.limits = Limits.of(layout)
        self.settings = settings
        self.clock = 0
        self.rounds = 0
        self.bytes_in = self.bytes_out = 0
        self._center = Center(layout, center, rule)
        self._rule = rule
        self._gated = type(rule).may_continue is not Rule.may_continue
        self._workers: dict[int, Worker] = {}
        self._buffers: dict[int, ByteArray] = {}
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
        self._started = not (rule.blocking or self._gated)
        self._cohort_done = False
        self._position = (0, 0)
        self._snapshot_position = (0, 0)
        self._released_epoch = -1
        self._driver_seen = 0.0
        self._failure: WorkerError | None = None
        self._wish = (False, math.nan)  # stop, learning rate: what the driver asked for
        self._shown = self._wish  # what workers are told; latched per round in blocking rules
        self._routes: dict[Kind, Callable[[int, Message], None]] = {
            Kind.HELLO: self._hello,
            Kind.PULL: self._pull,
            Kind.REPORT: self._report,
            Kind.SNAPSHOT: self._take_snapshot,
            Kind.STATE_PUT: self._state_put,
            Kind.STATE_GET: self._state_get,
            Kind.HEARTBEAT: self._heartbeat,
            Kind.FAIL: self._take_failure,
            Kind.FINISH: self._finish,
            Kind.BYE: self._bye,
            Kind.STATUS: self._status,
            Kind.CONTROL: self._control,
        }

    # ---------------------------------------------------------------- what transports call

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

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        """Takes one request; returns all replies that are due now, of any connection."""
        late: tuple[Worker, FloatArray, Commit] | None = None
        with self.lock:
            self._now = max(now, self._now)
            try:
                if message.kind in COMMITS:
                    late = self._commit(connection, message)
                elif message.kind in self._routes:
                    self._routes[message.kind](connection, message)
                else:
                    raise ProtocolError(
                        "a frame of a kind that servers do not take", received=message.kind.name
                    )
            except SparkDLError as error:
                self._refuse(connection, error)
            except Exception as error:
                self._break(error)
                self._refuse(connection, self._aborted())
            self._settle()
            replies = self._flush()
        if late is None:
            return replies
        worker, values, commit = late
        try:
            self._center.apply(values, commit)
        except Exception as error:
            with self.lock:
                self._break(error)
                self._refuse(connection, self._aborted())
                return replies + self._flush()
        reply = self._weights(connection, message)
        with self.lock:
            self._stamp(reply, worker)
        return [*replies, (connection, reply)]

    def disconnect(self, connection: int, now: float) -> Replies:
        """The connection is gone; its worker is dead unless it comes back within the grace."""
        with self.lock:
            self._now = max(now, self._now)
            self._waits.pop(connection, None)
            self._buffers.pop(connection, None)
            self._readings.pop(connection, None)
            for worker in self._workers.values():
                if worker.connection == connection:
                    worker.connection = None
                    if worker.alive and worker.lost_at is None:
                        worker.lost_at = self._now
            self._settle()
            return self._flush()

    def tick(self, now: float) -> Replies:
        """Ends leases, graces and waits that ran out. To be called a few times per second."""
        with self.lock:
            self._now = max(now, self._now)
            limits = self.settings
            for worker in self._workers.values():
                lost = worker.lost_at is not None and (self._now - worker.lost_at >= limits.grace_s)
                if worker.alive and (lost or self._now - worker.last_seen > limits.lease_s):
                    self._bury(worker)
            self._expire()
            self._settle()
            return self._flush()

    def is_bound(self, connection: int) -> bool:
        """Whether the connection belongs to a live worker or waits for a reply."""
        with self.lock:
            return connection in self._waits or any(
                w.connection == connection and w.alive for w in self._workers.values()
            )

    def metrics(self) -> dict[str, float]:
        """Numbers for /metrics."""
        with self.lock:
            workers = self._workers.values()
            commits = sum(w.commits for w in workers)
            return {
                "commits": commits,
                "rounds": self.rounds,
                "clock": self.clock,
                "workers_alive": sum(w.alive for w in workers),
                "workers_finished": sum(w.finished for w in workers),
                "waiting": len(self._waits),
                "rows": sum(w.rows for w in workers),
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
                "staleness_mean": sum(w.staleness_sum for w in workers) / max(commits, 1),
                "staleness_max": max((w.staleness_max for w in workers), default=0),
                "failed": float(self._failure is not None),
            }

    # ---------------------------------------------------------------- replies

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
        """OK for a push; the center as it is now for a pull."""
        if request.kind is Kind.PUSH:
            return Message(Kind.OK, sequence=request.sequence)
        reading = Reading(self._center.weights.view(np.uint8), lambda: self.buffer(connection))
        if not self._rule.lock_free:  # Hogwild! readers take what they find
            self._readings[connection] = reading
        return Message(Kind.WEIGHTS, sequence=request.sequence, reading=reading)

    def _preserve(self) -> None:
        """Before the center changes: whoever still reads it keeps what it was."""
        for reading in self._readings.values():
            reading.preserve()
        self._readings.clear()

    def _result(self, request: Message, rows: int) -> Message:
        """The round's result, sent from where it lies: it cannot change before this rank's
        next commit (or its death, and then nobody reads it)."""
        if request.kind is Kind.PUSH:
            return Message(Kind.OK, sequence=request.sequence, rows=rows)
        body = self._center.result.view(np.uint8)
        return Message(Kind.WEIGHTS, sequence=request.sequence, rows=rows, body=body)

    # ---------------------------------------------------------------- who is who

    def _live(self) -> list[Worker]:
        return [w for w in self._workers.values() if w.joined and w.alive]

    def _members(self) -> list[Worker]:
        return sorted((w for w in self._workers.values() if w.member), key=lambda w: w.rank)

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
        if old is not None and old != connection and old in self._waits:
            self._refuse(old, TransportError("this connection was replaced by a newer one"))

    def _bury(self, worker: Worker) -> None:
        worker.dead, worker.member = True, False
        self._round.payloads.pop(worker.rank, None)
        self._transfer.forget(worker.rank)
        if self._transfer.uploader == worker.rank:
            self._transfer.uploader = None

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

    # ---------------------------------------------------------------- joining

    def _hello(self, connection: int, message: Message) -> None:
        if not 0 <= message.rank < self.settings.num_workers:
            raise ProtocolError(
                "a worker with an impossible rank said HELLO",
                expected=f"0 .. {self.settings.num_workers - 1}",
                received=str(message.rank),
            )
        size = message.meta.get("weights_bytes", self.limits.weights_bytes)
        if size != self.limits.weights_bytes:
            raise ProtocolError(
                f"rank {message.rank}'s model does not fit the server's layout",
                expected=f"{self.limits.weights_bytes} bytes of weights",
                received=f"{size} bytes",
                hint="does the model build other layers on the executors?",
            )
        batches = message.meta.get("batches_per_epoch", 0)
        if not isinstance(batches, int) or batches < 0:
            raise ProtocolError("a malformed HELLO", received=f"batches_per_epoch={batches!r}")
        if self._failure is not None:
            raise self._failure
        worker = self._workers.setdefault(message.rank, Worker(message.rank))
        if message.attempt in worker.superseded:
            raise TransportError(
                f"attempt {message.attempt} of rank {message.rank} is superseded",
                received="HELLO",
                hint="the task was retried elsewhere; this one can end",
            )
        self._waits[connection] = Wait("twin", message, self._now)
        if worker.finished or worker.attempt in (None, message.attempt):
            self._enter(connection, message, worker)

    def _enter(self, connection: int, message: Message, worker: Worker) -> None:
        """Admits a HELLO whose rank no other live attempt holds."""
        if worker.finished or (self._cohort_done and not worker.member):
            self._welcome(connection, worker, Flag.DONE)
            return
        if worker.attempt not in (None, message.attempt):
            self._bury(worker)
        self._bind(connection, message, worker)
        worker.info = dict(message.meta)
        if worker.member or not (self._rule.blocking or self._gated):
            self._join(connection, worker)
        elif not self._started:
            self._waits[connection] = Wait("start", message, self._now)
        elif self._gated and not self._rule.blocking:
            self._join(connection, worker)
        else:
            self._waits[connection] = Wait("join", message, self._now)

    def _join(self, connection: int, worker: Worker, source: str = "center") -> None:
        if self._gated:  # a latecomer must not hold back those who are ahead
            others = [w.clock for w in self._live() if w is not worker]
            worker.clock = max(worker.clock, min(others, default=0))
        worker.joined = True
        worker.member = self._rule.blocking
        self._welcome(connection, worker, Flag.NONE, source)

    def _welcome(self, connection: int, worker: Worker, flag: Flag, source: str = "center") -> None:
        reply = Message(
            Kind.OK,
            flags=flag,
            sequence=worker.applied,
            rows=worker.rows,
            batches=worker.batches,
            epoch=worker.epoch,
            batch=worker.batch,
            meta={
                "num_workers": self.settings.num_workers,
                "source": source,
                "worker_clock": worker.clock,
                "lease_s": self.settings.lease_s,
                "steps_per_epoch": max(
                    (w.batches_per_epoch for w in self._workers.values()), default=0
                ),
                "released_epoch": self._released_epoch,
                "rule": self._rule.name,
                "payload": self._rule.payload,
                "blocking": self._rule.blocking,
            },
        )
        self._answer(connection, reply, worker)

    def _admit(self) -> None:
        """Answers the HELLOs that can be answered now."""
        for connection, wait in self._waiting("twin"):
            worker = self._workers[wait.message.rank]
            if worker.finished or not worker.reachable:
                self._enter(connection, wait.message, worker)
        starters = self._waiting("start")
        if starters and len(starters) == self.settings.num_workers:
            self._started = True
            self._shown = self._wish
            for connection, wait in starters:
                self._join(connection, self._workers[wait.message.rank])
        for connection, wait in self._waiting("join"):
            worker = self._workers[wait.message.rank]
            if self._cohort_done:
                self._welcome(connection, worker, Flag.DONE)
                continue
            if self._center.on_workers and self._members():
                continue  # the next round's reply asks a live rank to upload its state
            if self._center.on_workers:
                self._position = self._snapshot_position
            worker.epoch, worker.batch = self._position
            self._join(connection, worker, "snapshot" if self._center.on_workers else "center")

    def _waiting(self, reason: str) -> list[tuple[int, Wait]]:
        found = [(c, w) for c, w in self._waits.items() if w.reason == reason]
        return sorted(found, key=lambda item: (item[1].message.rank, item[1].since))

    # ---------------------------------------------------------------- commits

    def _commit(
        self, connection: int, message: Message
    ) -> tuple[Worker, FloatArray, Commit] | None:
        worker = self._identify(connection, message)
        if message.body is None:
            raise ProtocolError("a commit without a body")
        values = self.limits.weights(message.body)
        telemetry = parse_telemetry(message)
        if message.sequence <= worker.applied and not self._gated:
            reply = (
                self._result(message, self._round_rows)
                if self._rule.blocking
                else self._weights(connection, message)
            )
            reply.flags |= Flag.DUPLICATE
            if self._transfer.uploader == worker.rank:
                reply.flags |= Flag.UPLOAD  # it may have been told in the reply that was lost
            self._answer(connection, reply, worker)
            return None
        if self._rule.blocking:
            if not worker.member:
                raise TransportError(
                    f"rank {worker.rank} was dropped from the rounds",
                    expected=f"a sign of life every {self.settings.lease_s:g} s, and a broken "
                    f"connection back within {self.settings.grace_s:g} s",
                    hint="the task's next attempt joins again",
                )
            self._round.payloads[worker.rank] = Payload(connection, values, message)
            self._waits[connection] = Wait("round", message, self._now)
            return None
        if message.sequence <= worker.applied:
            self._waits[connection] = Wait("gate", message, self._now)
            return None
        commit = self._center.commit_of(worker, message, self.clock, self.settings.num_workers)
        if not self._rule.lock_free:
            self._preserve()
            try:
                self._center.apply(values, commit)
            except Exception as error:
                self._break(error)
                raise self._aborted() from error
        worker.staleness_sum += commit.staleness
        worker.staleness_max = max(worker.staleness_max, commit.staleness)
        worker.advance(message)
        self.clock += 1
        if message.kind is Kind.PUSH_PULL:
            worker.pulled_clock = self.clock
        self._telemetry.record(worker.rank, message.attempt, telemetry)
        if self._rule.lock_free:
            return worker, values, commit
        if self._gated:
            self._waits[connection] = Wait("gate", message, self._now)
        else:
            self._answer(connection, self._weights(connection, message), worker)
        return None

    def _pull(self, connection: int, message: Message) -> None:
        worker = self._identify(connection, message) if message.rank >= 0 else None
        if worker is not None:
            worker.pulled_clock = self.clock
        self._answer(connection, self._weights(connection, message), worker)

    def _take_snapshot(self, connection: int, message: Message) -> None:
        worker = self._identify(connection, message)
        if message.body is None or not self._center.on_workers:
            raise ProtocolError(
                "SNAPSHOT is for blocking rules on gradients",
                received=f"rule {self._rule.name!r}",
                hint="with other rules the server itself holds the weights",
            )
        self._preserve()
        np.copyto(self._center.weights, self.limits.weights(message.body))
        self._snapshot_position = (message.epoch, message.batch)
        self._answer(connection, Message(Kind.OK), worker)

    # ---------------------------------------------------------------- things that become due

    def _settle(self) -> None:
        """Re-examines every deferred reply; cheap, so it runs after each event."""
        if not self._waits:
            return
        try:
            if self._failure is None:
                self._admit()
                self._complete_round()
                self._open_gates()
                self._release()
        except Exception as error:
            self._break(error)
        if self._failure is not None:
            for connection in list(self._waits):
                self._refuse(connection, self._failure)

    def _complete_round(self) -> None:
        members = self._members()
        payloads = self._round.payloads
        if not members or any(w.rank not in payloads for w in members):
            return
        finished, self._round = self._round, Round()
        rows = self._round_rows = finished.rows
        self._preserve()
        self._center.apply_round(finished, self.clock, self._workers)
        self.clock += 1
        self.rounds += 1
        self._shown = self._wish
        uploader = self._choose_uploader(members)
        for rank, payload in sorted(payloads.items()):
            worker, message = self._workers[rank], payload.message
            worker.advance(message)
            worker.pulled_clock = self.clock
            self._position = max(self._position, (message.epoch, message.batch))
            self._telemetry.record(rank, message.attempt, parse_telemetry(message))
            wait = self._waits.get(payload.connection)
            if wait is None or wait.message is not message:
                continue  # its connection broke meanwhile; a resend gets the result
            reply = self._result(message, rows)
            if rank == uploader:
                reply.flags |= Flag.UPLOAD
            self._answer(payload.connection, reply, worker)

    def _choose_uploader(self, members: list[Worker]) -> int | None:
        """Lowest live rank, if a joiner waits for the state and nobody sends it yet."""
        if not (self._center.on_workers and self._waiting("join")):
            return None
        if self._transfer.uploader is None:
            present = [w.rank for w in members if w.reachable]
            self._transfer.uploader = present[0] if present else None
            return self._transfer.uploader
        return None

    def _open_gates(self) -> None:
        for connection, wait in self._waiting("gate"):
            worker = self._workers[wait.message.rank]
            slowest = min((w.clock for w in self._live()), default=worker.clock)
            if self._rule.may_continue(worker.clock, slowest):
                if wait.message.kind is Kind.PUSH_PULL:
                    worker.pulled_clock = self.clock
                self._answer(connection, self._weights(connection, wait.message), worker)

    def _release(self) -> None:
        for connection, wait in self._waiting("epoch"):
            if int(wait.message.meta.get("epoch", 0)) <= self._released_epoch:
                worker = self._workers.get(wait.message.rank)
                self._answer(connection, Message(Kind.OK), worker)

    def _expire(self) -> None:
        """Ends the waits that passed their limit; each error names who was missing."""
        limits, now = self.settings, self._now
        starters = self._waiting("start")
        if starters and now - min(w.since for _, w in starters) > limits.start_timeout_s:
            present = {w.message.rank for _, w in starters}
            missing = [r for r in range(limits.num_workers) if r not in present]
            for connection, _ in starters:
                self._time_out(
                    connection,
                    "the start of all workers",
                    missing,
                    limits.start_timeout_s,
                    "fewer free slots than workers?",
                )
        late = [
            (c, w)
            for c, w in self._waits.items()
            if w.reason in ("round", "gate", "join") and now - w.since > limits.round_timeout_s
        ]
        for connection, wait in late:
            rank = wait.message.rank
            if wait.reason == "gate":
                slowest = min((w.clock for w in self._live()), default=0)
                missing = [w.rank for w in self._live() if w.clock == slowest]
            else:
                missing = [w.rank for w in self._members() if w.rank not in self._round.payloads]
            self._time_out(
                connection,
                f"rank {rank}'s turn after its commit or HELLO",
                missing,
                limits.round_timeout_s,
                "raise round_timeout_s?",
            )
        for connection, wait in self._waiting("epoch"):
            if now - max(wait.since, self._driver_seen) > limits.release_timeout_s:
                self._time_out(
                    connection,
                    "the driver's release of the next epoch",
                    ["driver"],
                    limits.release_timeout_s,
                    "",
                )
        for _, wait in late:  # only now, so that no error names a rank that did commit
            payload = self._round.payloads.get(wait.message.rank)
            if payload is not None and payload.message is wait.message:
                self._bury(self._workers[wait.message.rank])

    def _time_out(
        self, connection: int, what: str, missing: list[Any], limit_s: float, hint: str
    ) -> None:
        names = ", ".join(str(m) for m in missing) or "nobody"
        error = WaitTimeoutError(
            f"waited too long for {what}; missing: {names}",
            expected=f"within {limit_s:g} s",
            received=f"nothing from {names}",
            hint=hint,
        )
        self._refuse(connection, error)

    # ---------------------------------------------------------------- a joiner's state

    def _state_put(self, connection: int, message: Message) -> None:
        worker = self._identify(connection, message)
        if not (worker.member and self._transfer.uploader == worker.rank):
            self._answer(connection, Message(Kind.OK), worker)  # nobody waits for it any more
            return
        if self._transfer.put(message):
            for joiner, wait in self._waiting("join"):
                fresh = self._workers[wait.message.rank]
                fresh.epoch, fresh.batch = self._transfer.position
                self._transfer.readers.add(fresh.rank)
                self._join(joiner, fresh, "state")
        self._answer(connection, Message(Kind.OK), worker)

    def _state_get(self, connection: int, message: Message) -> None:
        worker = self._identify(connection, message)
        offset = integer_of(message, "offset")
        chunk, total = self._transfer.get(offset, self.limits.buffer_bytes)
        if offset + chunk.size == total:
            self._transfer.forget(worker.rank)
        self._answer(connection, Message(Kind.STATE, meta={"total": total}, body=chunk), worker)

    # ---------------------------------------------------------------- telemetry, ends, driver

    def _report(self, connection: int, message: Message) -> None:
        worker = self._identify(connection, message)
        self._telemetry.record(worker.rank, message.attempt, parse_telemetry(message))
        if message.flags & Flag.WAIT:
            self._waits[connection] = Wait("epoch", message, self._now)
        else:
            self._answer(connection, Message(Kind.OK), worker)

    def _heartbeat(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        if worker is not None and worker.attempt == message.attempt:
            worker.last_seen = self._now
        reply = Message(Kind.OK)
        self._stamp(reply, worker)
        self._outbox.append((connection, reply))  # over http the connection may wait meanwhile

    def _take_failure(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        stale = worker is not None and message.attempt in worker.superseded
        if self._failure is None and not stale:
            self._failure = WorkerError(
                message.rank,
                str(message.meta.get("error", "unknown error")),
                str(message.meta.get("traceback", "")),
            )
        if worker is not None and worker.attempt == message.attempt:
            self._bury(worker)
        self._answer(connection, Message(Kind.OK))

    def _finish(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        if worker is None or not (worker.finished and worker.attempt == message.attempt):
            worker = self._identify(connection, message)
        worker.finished, worker.member = True, False
        self._cohort_done = self._rule.blocking
        self._transfer.forget(worker.rank)
        if self._transfer.uploader == worker.rank:
            self._transfer.uploader = None
        self._answer(connection, Message(Kind.OK), worker)

    def _bye(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        if worker is not None and worker.connection == connection and worker.alive:
            self._bury(worker)
        self._answer(connection, Message(Kind.OK))

    def _status(self, connection: int, message: Message) -> None:
        self._driver_seen = self._now
        since = message.meta.get("since_epoch", 0)
        failure = self._failure
        meta: dict[str, Any] = {
            "workers": {str(r): w.status() for r, w in sorted(self._workers.items())},
            "epochs": self._telemetry.summary(since if isinstance(since, int) else 0),
            "failure": None
            if failure is None
            else {"rank": failure.rank, "error": failure.error, "traceback": failure.traceback},
            "clock": self.clock,
            "commits": sum(w.commits for w in self._workers.values()),
            "rounds": self.rounds,
            "released_epoch": self._released_epoch,
            "started": self._started,
            "waiting": {str(w.message.rank): w.reason for w in self._waits.values()},
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }
        self._answer(connection, Message(Kind.OK, meta=meta))

    def _control(self, connection: int, message: Message) -> None:
        if message.rank >= 0:
            raise ProtocolError("only the driver may send CONTROL", received=f"{message.rank}")
        self._driver_seen = self._now
        meta = message.meta
        stop, learning_rate = self._wish
        try:
            stop = stop or bool(meta.get("stop", False))
            learning_rate = float(meta.get("learning_rate", learning_rate))
            released = int(meta.get("release", self._released_epoch))
        except (TypeError, ValueError) as error:
            raise ProtocolError("a malformed CONTROL", received=str(error)) from error
        self._wish = (stop, learning_rate)
        # In a blocking run every rank must learn of it at the same step: with a round or an epoch.
        if not self._rule.blocking or "release" in meta or not self._started:
            self._shown = self._wish
        self._released_epoch = max(self._released_epoch, released)
        self._answer(connection, Message(Kind.OK))
