"""The store of a run with a parameter server: center, rounds, and replies that read the center."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sparkdl.changes import VariableChanges
from sparkdl.codecs import Compression
from sparkdl.coordinator.blobs import chunk_reply
from sparkdl.coordinator.group import Group
from sparkdl.coordinator.store import Entry, Store, Work
from sparkdl.coordinator.worker import Worker
from sparkdl.errors import ProtocolError, TransportError
from sparkdl.ps.store.center import Center
from sparkdl.ps.store.first_pulls import FirstPulls
from sparkdl.ps.store.holdings import Holdings
from sparkdl.ps.store.reading import Reading
from sparkdl.ps.store.rounds import Payload, Round, numbers_without_gradient
from sparkdl.ps.store.sliced_commits import SlicedCommits
from sparkdl.ps.store.snapshot import Snapshot
from sparkdl.ps.store.sums import Sums
from sparkdl.ps.store.transfer import StateTransfer
from sparkdl.rules.rule import Rule
from sparkdl.slices import Slices
from sparkdl.transport.frames import COMMITS, Content, Flag, FrameLimits, Kind, Message
from sparkdl.weights import FloatArray, Layout

GIVE_WAY_S = 5.0
"""A lost rank's own attempt has this long to come before a live rank leaves its slot to it."""


class ParameterStore(Store):
    """Weights that all workers share, changed by a rule; a store of a coordinator.

    A commit is applied from its connection's buffer. A reply reads the center itself; only if a
    commit changes the center meanwhile is the unread rest copied, into that same buffer. So replies
    are consistent, and memory stays at center + rule state + one buffer each. A rule with
    ``lock_free`` is applied outside the lock, concurrently.

    Args:
        layout: Of the flat buffer.
        center: Initial weights; taken over, not copied.
        rule: How commits change the center.
        compression: What workers may send encoded; None refuses encoded commits.
        together: All ranks begin at the same moment, whatever the rule is.
    """

    kinds = frozenset(
        {
            Kind.PULL,
            Kind.PUSH,
            Kind.PUSH_PULL,
            Kind.SNAPSHOT,
            Kind.STATE_PUT,
            Kind.STATE_GET,
            Kind.ADD_UP,
            Kind.SLICES_PUT,
            Kind.SLICES_GET,
        }
    )

    def __init__(
        self,
        layout: Layout,
        center: FloatArray,
        rule: Rule,
        compression: Compression | None = None,
        *,
        together: bool = False,
    ) -> None:
        self._together = together
        encoded = 0 if compression is None else compression.max_bytes
        self.limits = FrameLimits(dense_bytes=layout.size_bytes, encoded_bytes=encoded)
        self.rounds = 0
        self._compression = compression
        self._sliced = SlicedCommits(layout, compression)
        self._num_trained = layout.num_trained
        self._center = Center(layout, center, rule, compression)
        self._holdings = None if compression is None else Holdings(compression)
        self._rule = rule
        self._gated = rule.gated
        self._readings: dict[int, Reading] = {}
        self._round = Round()
        self._round_rows = 0
        self._round_meta: dict[str, list[int]] = {}
        self._position = (0, 0)
        self._entered: dict[int, int | None] = {}

    # -- what the coordinator asks ---------------------------------------------------------------

    @property
    def together(self) -> bool:
        """Whether all ranks begin at the same moment: where any of them waits for others."""
        return self._together or self._rule.blocking or self._gated

    @property
    def in_step(self) -> bool:
        """Whether the ranks train in rounds."""
        return self._rule.blocking

    @property
    def latched(self) -> bool:
        """With rounds, every rank must learn of an order at the same step."""
        return self._rule.blocking

    @property
    def name(self) -> str:
        """The rule's name."""
        return repr(self._rule.name)

    def attach(self, group: Group) -> None:
        """Takes the run's group."""
        super().attach(group)
        self._first_pulls = FirstPulls(group)
        self._snapshot = Snapshot(group)
        self._sums = Sums(group)
        most = group.settings.max_state_bytes
        self._transfer = StateTransfer(
            8 * self.limits.dense_bytes + (64 << 20) if most is None else most
        )

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

    def enter(self, worker: Worker, *, late: bool) -> Entry | None:
        """Lets a worker in.

        A late one takes the center; where the workers hold the weights it gets the state of a
        member, which :class:`StateTransfer` brings, or the last snapshot if no member is left.
        Where they train in rounds it goes on at the open round: its rank is missing there.
        """
        group = self._group
        if self._gated:  # a latecomer must not hold back those who are ahead
            others = [w.clock for w in group.members() if w is not worker]
            worker.clock = max(worker.clock, min(others, default=0))
        if not late and not self.together:
            self._first_pulls.expect(worker.rank)
        entry = Entry("center") if not late or not self.in_step else self._enter_rounds(worker)
        if entry is not None:
            self._entered[worker.rank] = worker.attempt
        return entry

    def _enter_rounds(self, worker: Worker) -> Entry | None:
        """The next attempt of a rank that was lost: it trains all that this rank has yet to."""
        group = self._group
        entry = Entry("center")
        if self._center.on_workers and self._transfer.fresh:
            self._transfer.readers.add(worker.rank)
            entry = Entry("state")
        elif self._center.on_workers and group.members():
            return None  # a member that waits in the open round is asked for its state
        elif self._center.on_workers:
            self._go_back()
            entry = Entry("snapshot")
        worker.epoch, worker.batch = self._open_position()
        self._round.payloads.pop(worker.rank, None)  # of the former attempt: it is trained again
        return entry

    def gives_way(self, since: float) -> bool:
        """Whether the round that is open needs the slot of a live rank for one that was lost.

        Spark runs a whole stage again where an executor took rows of it along: then the copy of a
        rank that lives may hold the only free slot, and the lost rank waits for ever. The copy goes
        on in the place of the live attempt, from its state, and that attempt's slot becomes free.
        """
        return self._needs_slot(since) and (self._transfer.fresh or not self._center.on_workers)

    def _needs_slot(self, since: float) -> bool:
        group = self._group
        return (
            self.in_step
            and group.now - since >= GIVE_WAY_S
            and any(not w.alive for w in self._of_a_round())
        )

    def _open_position(self) -> tuple[int, int]:
        """The epoch and batch of the open round: those of the workers that wait in it."""
        for _, payload in sorted(self._round.payloads.items()):
            return payload.message.epoch, payload.message.batch - 1
        return self._transfer.position if self._transfer.fresh else self._position

    def _go_back(self) -> None:
        """All that was trained since the snapshot is lost: it is trained again, and counts then.

        A worker that was silent for long may come back with later weights: it is refused.
        """
        group = self._group
        self._position = self._snapshot.position
        group.telemetry.forget(self._position[0])
        for worker in group.workers.values():
            worker.epoch, worker.batch = self._position
        self._entered.clear()
        self._round, self._transfer.fresh = Round(), False
        for connection, wait in group.waiting("round"):
            group.refuse(connection, self._dropped(group.workers[wait.message.rank]))

    def leave(self, worker: Worker) -> None:
        """Forgets what is kept for a worker that is dead or done."""
        if self._holdings is not None:
            self._holdings.forget(worker.rank)
        self._sliced.forget(worker.rank)
        self._transfer.leave(worker.rank)
        self._first_pulls.forget(worker.rank)
        self._snapshot.leave(worker.rank)
        if worker.finished:
            self._round.payloads.pop(worker.rank, None)

    def disconnect(self, connection: int) -> None:
        """Nobody reads this connection's reply any more."""
        self._readings.pop(connection, None)

    def missing(self) -> list[int]:
        """Ranks that the present round waits for."""
        here = {w.message.rank for _, w in self._group.waiting("sums")} | {*self._round.payloads}
        return [w.rank for w in self._of_a_round() if w.rank not in here]

    def _of_a_round(self) -> list[Worker]:
        """The ranks whose rows a round wants: a lost one's, too, whose next attempt brings them."""
        found = [w for w in self._group.workers.values() if not w.finished]
        return sorted(found, key=lambda worker: worker.rank)

    def decoded(self, connection: int, message: Message) -> Message:
        """A commit with its values instead of their payload; needs no lock.

        The values take the payload's place in the connection's buffer, so that a commit costs a
        copy of its few bytes, and no second buffer.
        """
        if message.kind is Kind.PUSH_PULL and (message.total or message.content is Content.SLICES):
            raw = self._group.buffer(connection)[: self.limits.dense_bytes]
            return self._sliced.decoded(message, self.limits.dense(raw))
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
            return self._commit(connection, message)
        if message.kind is Kind.PULL:
            self._pull(connection, message)
        elif message.kind is Kind.SNAPSHOT:
            self._take_snapshot(connection, message)
        elif message.kind is Kind.SLICES_PUT:
            worker = self._group.identify(connection, message)
            self._sliced.put(message, wanted=self._rule.replies_mean)
            self._group.answer(connection, Message(Kind.OK), worker)
        elif message.kind is Kind.SLICES_GET:
            worker = self._group.identify(connection, message)
            whole = self._center.slices_for(message)
            reply = chunk_reply(whole, message.offset, self._group.limits.chunk_bytes)
            self._group.answer(connection, reply, worker)
        elif message.kind is Kind.ADD_UP:
            self._add_up(connection, message)
        else:
            self._transfer.receive(self._group, connection, message)
        return None

    def write(self, changes: VariableChanges) -> None:
        """Sets what the driver's callbacks wrote to the weights."""
        if changes.offsets:
            self._preserve()
            changes.write_into(self._center.weights)

    def settle(self) -> None:
        """Answers the first pulls, completes the round, opens the gates, answers the last pulls."""
        if all(wait.reason == "round" for wait in self._group.waits):  # as after most commits
            self._complete_round()
            return
        for connection, wait in self._first_pulls.take():
            self._answer_pull(connection, wait.message, self._group.workers[wait.message.rank])
        self._sums.settle([w.rank for w in self._of_a_round()], self._round.payloads)
        self._complete_round()
        self._ask_for_state()
        self._open_gates()
        self._answer_last_pulls()
        self._snapshot.settle()

    def expire(self) -> None:
        """Ends the waits of commits that passed their limit; each error names who was missing."""
        self._first_pulls.expire()
        self._snapshot.expire()
        group, limits = self._group, self._group.settings
        missing = self.missing()
        lost = [rank for rank in missing if not group.workers[rank].alive]
        for connection, wait in group.waiting("round", "gate", "sums"):
            in_round, since = wait.reason != "gate", wait.since
            limit_s = limits.round_timeout_s
            if in_round and lost:
                limit_s = limits.start_timeout_s
                since = max(since, *(group.workers[rank].last_seen for rank in lost))
            if group.now - since <= limit_s:
                continue
            if not in_round:
                slowest = min((w.clock for w in self._training()), default=0)
                missing = [w.rank for w in self._training() if w.clock == slowest]
            group.time_out(
                connection, f"rank {wait.message.rank}'s turn after its commit", missing, limit_s,
                f"rank {lost[0]} was lost, and no new attempt has joined: are there free slots for "
                "it? start_timeout_s is how long the others wait" if in_round and lost
                else "raise round_timeout_s?",
            )  # fmt: skip

    # -- commits ---------------------------------------------------------------------------------

    def _commit(self, connection: int, message: Message) -> Work | None:
        group = self._group
        worker = group.identify(connection, message)
        slices: list[Slices] = []
        others = [p for p in self._round.contributions if p.message.rank != message.rank]
        if message.content is Content.SLICES and self._rule.replies_mean:
            values, slices = self._sliced.values(message, others)
        else:
            values = self._values(message)
            self._sliced.check_dense(message, others)
        self._first_pulls.forget(worker.rank)
        if message.sequence <= worker.applied and not self._gated:
            self._answer_again(connection, message, worker)
            return None
        if self._rule.blocking:
            self._enter_round(worker)
            without = numbers_without_gradient(message, self._num_trained)
            payload = Payload(connection, values, message, slices, without)
            self._round.payloads[worker.rank] = payload
            group.defer(connection, "round", message)
            return None
        if message.sequence <= worker.applied:
            group.defer(connection, "gate", message)
            return None
        commit = self._center.commit_of(worker, message, group.clock, group.settings.num_workers)
        if not self._rule.lock_free:
            self._preserve()
            self._center.apply(values, commit)
        worker.count_staleness(commit.staleness)
        worker.advance(message)
        group.clock += 1
        if message.kind is Kind.PUSH_PULL:
            worker.pulled_clock = group.clock
        if self._rule.lock_free:

            def apply() -> Message:
                self._center.apply(values, commit)
                return self._weights(connection, message)

            return Work(apply, worker)
        if self._gated:
            group.defer(connection, "gate", message)
        else:
            group.answer(connection, self._weights(connection, message), worker)
        return None

    def _dropped(self, worker: Worker) -> TransportError:
        """The error for a worker whose run has gone back to a snapshot without it."""
        limits = self._group.settings
        return TransportError(
            f"rank {worker.rank} was dropped from the rounds",
            expected=f"a sign of life every {limits.lease_s:g} s, and a broken "
            f"connection back within {limits.grace_s:g} s",
            received=f"nothing from attempt {worker.attempt} for longer",
            hint="the task's next attempt joins again",
        )

    def _enter_round(self, worker: Worker) -> None:
        if self._entered.get(worker.rank, -1) != worker.attempt:
            raise self._dropped(worker)
        worker.member = True  # it was silent for long; the round has waited for it

    def _add_up(self, connection: int, message: Message) -> None:
        worker = self._group.identify(connection, message)
        self._enter_round(worker)
        self._sums.take(connection, message)

    def _values(self, message: Message) -> FloatArray:
        """The values of a commit, in the buffer that they arrived in."""
        body = message.body
        whole = body is not None and body.nbytes == self.limits.dense_bytes
        if body is None or not whole or message.content is not Content.DENSE:
            raise ProtocolError(
                f"a {message.kind.name} frame without the whole flat buffer",
                expected=f"{self.limits.dense_bytes} bytes of {Content.DENSE.name}",
                received=f"{message.body_bytes} bytes of {message.content.name}",
            )
        return self.limits.dense(body)

    def _answer_again(self, connection: int, message: Message, worker: Worker) -> None:
        """The reply to a commit that was applied before: its first reply was lost."""
        if self._rule.blocking:
            reply = self._result(message, self._round_rows)
        else:
            reply = self._weights(connection, message)
        reply.flags |= Flag.DUPLICATE
        self._group.answer(connection, reply, worker)

    def _pull(self, connection: int, message: Message) -> None:
        group = self._group
        worker = group.identify(connection, message) if message.rank >= 0 else None
        if worker is not None and message.flags & Flag.WAIT:
            group.defer(connection, "last", message)
            return
        if worker is not None and worker.rank in self._first_pulls:
            group.defer(connection, "begin", message)
            return
        self._answer_pull(connection, message, worker)

    def _answer_pull(self, connection: int, message: Message, worker: Worker | None) -> None:
        group = self._group
        if worker is not None:
            worker.pulled_clock = group.clock
            self._center.pulled(worker.rank)
        group.answer(connection, self._weights(connection, message), worker)

    def _take_snapshot(self, connection: int, message: Message) -> None:
        worker = self._group.identify(connection, message)
        if not self._center.on_workers:
            raise ProtocolError(
                "SNAPSHOT is for rules that wait and take gradients",
                expected="a rule whose workers hold the weights",
                received=f"rule {self._rule.name!r}",
                hint="with other rules the server itself holds the weights",
            )
        if message.flags & Flag.WAIT:  # whether to send them
            self._group.defer(connection, "snapshot", message)
            return
        values = self._values(message)
        if self._snapshot.take(message):
            self._preserve()
            np.copyto(self._center.weights, values)
        self._group.answer(connection, Message(Kind.OK), worker)

    # -- rounds and gates ------------------------------------------------------------------------

    def _complete_round(self) -> None:
        group = self._group
        payloads = self._round.payloads
        if not payloads or any(w.rank not in payloads for w in self._of_a_round()):
            return
        finished, self._round = self._round, Round()
        self._transfer.fresh = False
        rows = self._round_rows = finished.rows
        self._round_meta = finished.reply_meta
        self._preserve()
        self._center.apply_round(finished, group.clock)
        group.clock += 1
        self.rounds += 1
        group.orders.latch()
        for rank, payload in sorted(payloads.items()):
            worker, message = group.workers[rank], payload.message
            worker.advance(message)
            worker.pulled_clock = group.clock
            self._position = max(self._position, (message.epoch, message.batch))
            wait = group.wait_of(payload.connection)
            if wait is None or wait.message is not message:
                continue  # its connection broke meanwhile; a resend gets the result
            group.answer(payload.connection, self._result(message, rows), worker)

    def _training(self) -> list[Worker]:
        """Members that will commit again: they do not wait for the others' last commits."""
        through = {wait.message.rank for _, wait in self._group.waiting("last")}
        return [worker for worker in self._group.members() if worker.rank not in through]

    def _answer_last_pulls(self) -> None:
        """Gives the center to those who wait for the last commits, when all members do."""
        last = self._group.waiting("last")
        if not last or self._training():
            return
        for connection, wait in last:
            worker = self._group.workers[wait.message.rank]
            self._answer_pull(connection, wait.message, worker)

    def _open_gates(self) -> None:
        group = self._group
        for connection, wait in group.waiting("gate"):
            worker = group.workers[wait.message.rank]
            slowest = min((w.clock for w in self._training()), default=worker.clock)
            if self._rule.may_continue(worker.clock, slowest):
                if wait.message.kind is Kind.PUSH_PULL:
                    worker.pulled_clock = group.clock
                group.answer(connection, self._weights(connection, wait.message), worker)

    # -- replies with weights --------------------------------------------------------------------

    def _weights(self, connection: int, request: Message) -> Message:
        """OK for a push; the center as it is now, or its encoded change, for a pull."""
        if request.kind is Kind.PUSH:
            return Message(Kind.OK, sequence=request.sequence)
        encoded = request.flags & Flag.ENCODED and request.rank >= 0
        if self._holdings is not None and encoded and not self._center.on_workers:
            return self._holdings.answer(request, self._center.weights)
        group = self._group
        reading = Reading(self._center.weights.view(np.uint8), lambda: group.buffer(connection))
        if not self._rule.lock_free:  # Hogwild! readers take what they find
            self._readings[connection] = reading
        return Message(
            Kind.WEIGHTS, sequence=request.sequence, content=Content.DENSE, reading=reading
        )

    def _result(self, request: Message, rows: int) -> Message:
        """The round's result, sent from where it lies: it cannot change before this rank's
        next commit (or its death, and then nobody reads it)."""
        if request.kind is Kind.PUSH:
            return Message(Kind.OK, sequence=request.sequence, rows=rows)
        reply = Message(Kind.WEIGHTS, sequence=request.sequence, rows=rows, content=Content.DENSE)
        reply.meta = dict(self._round_meta)
        if self._center.sliced is not None:
            return self._sliced_result(request, reply)
        if self._holdings is None or not request.flags & Flag.ENCODED:
            reply.body = self._center.result.view(np.uint8)
        elif self._center.on_workers:
            reply.flags, reply.body = Flag.ENCODED, self._center.encoded
        else:
            reply = self._holdings.answer(request, self._center.weights)
            reply.rows = rows
        return reply

    def _sliced_result(self, request: Message, reply: Message) -> Message:
        """The result where gradients of some variables are slices; a large one is read in chunks.

        It stays what it is for the same reason.
        """
        body = self._center.slices_for(request)
        if request.flags & Flag.ENCODED:
            reply.flags |= Flag.ENCODED
        if body.size > self.limits.buffer_bytes:
            reply.content, reply.total = Content.NOTHING, body.size
        else:
            reply.content, reply.body = Content.SLICES, body
        return reply

    def _preserve(self) -> None:
        """Before the center changes: whoever still reads it keeps what it was."""
        for reading in self._readings.values():
            reading.preserve()
        self._readings.clear()

    # -- the state of a joiner -------------------------------------------------------------------

    def _ask_for_state(self) -> None:
        """Has a member of the open round send its state, if a joiner or a copy waits for one.

        It is the state in which the round began, for no round passes a rank that is missing. The
        member sends its commit again afterwards.
        """
        group, transfer = self._group, self._transfer
        if not self._center.on_workers or transfer.fresh:
            return
        copies = [wait for _, wait in group.waiting("duplicate") if self._needs_slot(wait.since)]
        if not copies and not group.waiting("join"):
            return
        for connection, wait in group.waiting("round", "sums"):
            worker = group.workers[wait.message.rank]
            asked = transfer.uploader in (None, worker.rank)
            if not (asked and worker.member and worker.reachable):
                continue
            transfer.uploader = worker.rank
            self._round.payloads.pop(worker.rank, None)  # its buffer is needed for the state
            reply = Message(Kind.OK, flags=Flag.UPLOAD, sequence=worker.applied)
            group.answer(connection, reply, worker)
