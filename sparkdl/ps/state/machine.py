"""The state machine that every transport feeds: ``receive``, ``disconnect``, ``tick``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sparkdl.errors import ProtocolError, SparkDLError, TransportError, WaitTimeoutError
from sparkdl.ps.codecs import Compression
from sparkdl.ps.rules.rule import Commit, Rule
from sparkdl.ps.state.records import Payload, Settings, Wait, Worker
from sparkdl.ps.state.reporting import Reporting
from sparkdl.ps.state.roster import Replies
from sparkdl.ps.state.rounds import Round
from sparkdl.ps.state.telemetry import parse_telemetry
from sparkdl.transport.frames import COMMITS, Flag, Kind, Message
from sparkdl.weights import FloatArray, Layout


class ServerState(Reporting):
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
        compression: What workers may send encoded; None refuses encoded commits.
    """

    def __init__(
        self,
        layout: Layout,
        center: FloatArray,
        rule: Rule,
        settings: Settings,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(layout, center, rule, settings, compression)
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

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        """Takes one request; returns all replies that are due now, of any connection."""
        late: tuple[Worker, FloatArray, Commit] | None = None
        refusal: SparkDLError | None = None
        if message.flags & Flag.ENCODED and message.kind in COMMITS:
            try:
                message = self._decoded(connection, message)
            except SparkDLError as error:
                refusal = error
        with self.lock:
            self._now = max(now, self._now)
            try:
                if refusal is not None:
                    raise refusal
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
            self._mailboxes.discard(connection)
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

    def _decoded(self, connection: int, message: Message) -> Message:
        """The commit with its values instead of their payload; needs no lock.

        The values take the payload's place in the connection's buffer, so that a commit costs a
        copy of its few bytes, and no second buffer.
        """
        if self._compression is None:
            raise ProtocolError("an encoded commit in a run without compression")
        body = np.empty(0, np.uint8) if message.body is None else message.body.copy()
        raw = self.buffer(connection)[: self.limits.weights_bytes]
        self._compression.commits.decode(body, self.limits.weights(raw))
        return replace(message, body=raw)

    def _result(self, request: Message, rows: int) -> Message:
        """The round's result, sent from where it lies: it cannot change before this rank's
        next commit (or its death, and then nobody reads it)."""
        if request.kind is Kind.PUSH:
            return Message(Kind.OK, sequence=request.sequence, rows=rows)
        reply = Message(Kind.WEIGHTS, sequence=request.sequence, rows=rows)
        if self._holdings is None or not request.flags & Flag.ENCODED:
            reply.body = self._center.result.view(np.uint8)
        elif self._center.on_workers:
            reply.flags, reply.body = Flag.ENCODED, self._center.encoded
        else:
            reply = self._holdings.answer(request, self._center.weights)
            reply.rows = rows
        return reply

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
            try:
                self._center.pulled(worker.rank)
            except Exception as error:
                self._break(error)
                raise self._aborted() from error
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
