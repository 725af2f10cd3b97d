"""The stores: each commit changes the center when it comes, or the mean of a round does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.coordinator.blobs import chunk_reply
from sparkdl.coordinator.group import Group, Wait, Work, Worker
from sparkdl.errors import TransportError
from sparkdl.ps.kinds import DECISION, Decision, Member, StoreKind
from sparkdl.ps.store.center import ParameterStore
from sparkdl.ps.store.rounds import (
    CarriedValues,
    Payload,
    Round,
    SlicedCommits,
    Snapshot,
    StateTransfer,
    Sums,
    numbers_without_gradient,
)
from sparkdl.rules.rule import Rule
from sparkdl.training.slices import Slices
from sparkdl.transport.frames import Flag, Kind, Message
from sparkdl.weights import FloatArray, Layout

GIVE_WAY_S = 5.0
"""Seconds that a lost rank's own attempt has to come before a live rank leaves its slot to it."""


class FirstPulls(set[int]):
    """The ranks whose first pull is held back until all that were let in together have asked.

    Without this, a worker that pulls late would start from weights that the others have already
    trained; with short epochs, trained to the end.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def expire(self) -> None:
        """Nobody is waited for any more, if one has waited as long as for the workers to come."""
        limit_s = self._group.settings.gather_s
        if any(self._group.now - w.since > limit_s for _, w in self._group.waiting("begin")):
            self.clear()

    def take(self) -> list[tuple[int, Wait]]:
        waits = self._group.waiting("begin")
        if self - {wait.message.rank for _, wait in waits}:
            return []
        self.clear()
        return waits


class CommitStore(ParameterStore):
    """Applies each commit by itself; with a *gate* a worker that is far ahead waits for the others.

    A rule with ``lock_free`` is applied outside the lock, concurrently.

    Args:
        together: All ranks begin at the same moment, whatever the rule is.
    """

    in_step = False

    def __init__(
        self,
        layout: Layout,
        center: FloatArray,
        rule: Rule,
        compression: Compression | None = None,
        *,
        together: bool = False,
    ) -> None:
        super().__init__(layout, center, rule, compression)
        self._gated = rule.gated
        self.together = together or self._gated  # where any of them waits for others

    def attach(self, group: Group) -> None:
        super().attach(group)
        self._first_pulls = FirstPulls(group)

    def enter(self, worker: Worker, *, late: bool) -> str:
        """Lets a worker in, which takes the center as it is."""
        if self._gated:  # a latecomer must not hold back those who are ahead
            others = [w.clock for w in self._group.members() if w is not worker]
            worker.clock = max(worker.clock, min(others, default=0))
        if not late and not self.together:
            self._first_pulls.add(worker.rank)
        return "center"

    def leave(self, worker: Worker) -> None:
        super().leave(worker)
        self._first_pulls.discard(worker.rank)

    def settle(self) -> None:
        """Answers the first pulls, opens the gates, answers the last pulls."""
        for connection, wait in self._first_pulls.take():
            self._answer_pull(connection, wait.message)
        self._open_gates()
        last = self._group.waiting("last")
        if last and not self._training():
            for connection, wait in last:
                self._answer_pull(connection, wait.message)

    def expire(self) -> None:
        self._first_pulls.expire()
        group, limit_s = self._group, self._group.settings.round_timeout_s
        for connection, wait in group.waiting("gate"):
            if group.now - wait.since > limit_s:
                slowest = min((w.clock for w in self._training()), default=0)
                group.time_out(
                    connection, f"rank {wait.message.rank}'s turn after its commit",
                    [w.rank for w in self._training() if w.clock == slowest], limit_s,
                    "raise round_timeout_s?",
                )  # fmt: skip

    def _commit(self, connection: int, message: Message, worker: Worker) -> Work | None:
        group, values = self._group, self._replies.values(message)
        self._first_pulls.discard(worker.rank)  # it commits without a pull: nobody waits for it
        again = message.sequence <= worker.applied  # its first reply was lost
        if not again:
            count = group.settings.num_workers
            commit = self._replies.take(worker, message, values, group.clock, count)
            group.clock += 1
            if self._rule.lock_free:

                def apply() -> Message:
                    self._center.apply(values, commit)
                    return self._replies.weights(connection, message)

                return Work(apply, worker)
        if self._gated:
            group.defer(connection, "gate", message)
            return None
        reply = self._replies.weights(connection, message)
        reply.flags |= Flag.DUPLICATE if again else Flag.NONE
        group.answer(connection, reply, worker)
        return None

    def _pull(self, connection: int, message: Message, worker: Worker | None) -> None:
        """A worker's first pull may wait for the others' first, its last for their last commits."""
        if worker is not None and message.flags & Flag.WAIT:
            self._group.defer(connection, "last", message)
        elif worker is not None and worker.rank in self._first_pulls:
            self._group.defer(connection, "begin", message)
        else:
            super()._pull(connection, message, worker)

    def _answer_pull(self, connection: int, message: Message) -> None:
        super()._pull(connection, message, self._group.workers[message.rank])

    def _training(self) -> list[Worker]:
        """Members that will commit again: they do not wait for the others' last commits."""
        through = {wait.message.rank for _, wait in self._group.waiting("last")}
        return [worker for worker in self._group.members() if worker.rank not in through]

    def _open_gates(self) -> None:
        group = self._group
        for connection, wait in group.waiting("gate"):
            worker = group.workers[wait.message.rank]
            slowest = min((w.clock for w in self._training()), default=worker.clock)
            if self._rule.may_continue(worker.clock, slowest):
                if wait.message.kind is StoreKind.PUSH_PULL:
                    worker.pulled_clock = group.clock
                group.answer(connection, self._replies.weights(connection, wait.message), worker)


class RoundStore(ParameterStore):
    """Applies the row-weighted mean of a round when every rank has sent its part.

    A round waits for the next attempt of a rank that was lost. Where the workers hold the weights
    (rules that take gradients) that attempt gets the state of a member, or the last snapshot.

    Args:
        decides_for: The layout of the values where these lie on shards; None: they lie here.
    """

    kinds = frozenset(kind for kind in StoreKind if kind < StoreKind.STAGE)  # others are to shards
    latched = True  # with rounds, every rank must learn of an order at the same step

    def __init__(
        self,
        layout: Layout,
        center: FloatArray,
        rule: Rule,
        compression: Compression | None = None,
        *,
        decides_for: Layout | None = None,
    ) -> None:
        super().__init__(layout, center, rule, compression)
        self.rounds = 0
        self._decides = decides_for is not None
        whole = layout if decides_for is None else decides_for
        self._sliced = SlicedCommits(whole, compression, beside=self._decides)
        self._num_trained = whole.num_trained
        self._members: list[Member] = []
        self._round = Round()
        self._round_rows = 0
        self._round_meta: dict[str, Any] = {}
        self._position = (0, 0)
        self._entered: dict[int, int | None] = {}

    def attach(self, group: Group) -> None:
        super().attach(group)
        self._snapshot = Snapshot(group, "snapshot", "the weights after the last round")
        self._sums = Sums(group)
        most = group.settings.max_state_bytes
        most = 8 * self.limits.dense_bytes + (64 << 20) if most is None else most
        self._transfer = StateTransfer(most)
        self._carried = CarriedValues(group, most)

    def enter(self, worker: Worker, *, late: bool) -> str | None:
        """Lets a worker in; a late one goes on at the open round, where its rank is missing."""
        source = self._enter_late(worker) if late else "center"
        if source is not None:
            self._entered[worker.rank] = worker.attempt
        return source

    def _enter_late(self, worker: Worker) -> str | None:
        """The next attempt of a rank that was lost: it trains all that this rank has yet to."""
        source = "center"
        if self._center.on_workers and self._transfer.fresh:
            self._transfer.readers.add(worker.rank)
            source = "state"
        elif self._center.on_workers and self._group.members():
            return None  # a member that waits in the open round is asked for its state
        elif self._center.on_workers:
            self._go_back()
            source = "snapshot"
        worker.epoch, worker.batch = self._open_position()
        self._round.payloads.pop(worker.rank, None)  # of the former attempt: it is trained again
        return source

    def gives_way(self, since: float) -> bool:
        """Whether the round that is open needs the slot of a live rank for one that was lost.

        Spark runs a whole stage again where an executor took rows of it along: then the copy of a
        rank that lives may hold the only free slot, and the lost rank waits for ever. The copy goes
        on in the place of the live attempt, from its state, and that attempt's slot becomes free.
        """
        return self._needs_slot(since) and (self._transfer.fresh or not self._center.on_workers)

    def _needs_slot(self, since: float) -> bool:
        waited = self._group.now - since >= GIVE_WAY_S
        return waited and any(not w.alive for w in self._of_a_round())

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
        self._carried.go_back(self._position)
        group.telemetry.forget(self._position[0])
        for worker in group.workers.values():
            worker.epoch, worker.batch = self._position
        self._entered.clear()
        self._round, self._transfer.fresh = Round(), False
        for connection, wait in group.waiting("round"):
            group.refuse(connection, self._dropped(group.workers[wait.message.rank]))

    @property
    def _decision(self) -> dict[str, Any]:
        """For the meta of a reply, where shards follow what is decided here."""
        if not self._decides:
            return {}
        decision = Decision(self._group.clock, self._members, self._snapshot.position)
        return {DECISION: decision.to_wire()}

    def welcome(self) -> Mapping[str, Any]:
        """The rule's name and what it takes, and what is decided."""
        return {**super().welcome(), **self._decision}

    def leave(self, worker: Worker) -> None:
        super().leave(worker)
        self._sliced.forget(worker.rank)
        self._transfer.leave(worker.rank)
        self._snapshot.leave(worker.rank)
        self._carried.leave(worker.rank)
        if worker.finished:
            self._round.payloads.pop(worker.rank, None)

    def missing(self) -> list[int]:
        here = {w.message.rank for _, w in self._group.waiting("sums")} | {*self._round.payloads}
        return [w.rank for w in self._of_a_round() if w.rank not in here]

    def _of_a_round(self) -> list[Worker]:
        """The ranks whose rows a round wants: a lost one's, too, whose next attempt brings them."""
        found = [w for w in self._group.workers.values() if not w.finished]
        return sorted(found, key=lambda worker: worker.rank)

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

    def decoded(self, connection: int, message: Message) -> Message:
        """A commit with its values instead of their payload; slices stay beside them."""
        if message.kind is StoreKind.PUSH_PULL and message.flags & Flag.SLICED:
            raw = self._group.buffer(connection)[: self.limits.dense_bytes]
            return self._sliced.decoded(message, self.limits.dense(raw))
        return super().decoded(connection, message)

    def receive(self, connection: int, message: Message) -> Work | None:
        if message.kind in ParameterStore.kinds:
            return super().receive(connection, message)
        group, kind = self._group, message.kind
        worker = group.identify(connection, message)
        if kind is StoreKind.ADD_UP:
            self._enter_round(worker)
            self._sums.take(connection, message)
        elif kind is StoreKind.SLICES_PUT:
            self._sliced.put(message, wanted=self._rule.replies_mean)
            group.answer(connection, Message(Kind.OK), worker)
        elif kind is StoreKind.SLICES_GET:
            whole = self._center.slices_for(message)
            reply = chunk_reply(whole, message.offset, group.limits.chunk_bytes)
            group.answer(connection, reply, worker)
        elif kind in (StoreKind.CARRIED, StoreKind.CARRIED_PUT, StoreKind.CARRIED_GET):
            self._enter_round(worker)
            self._carried.receive(connection, message, worker)
        else:
            self._transfer.receive(group, connection, message)
        return None

    def _commit(self, connection: int, message: Message, worker: Worker) -> Work | None:
        slices: list[Slices] = []
        others = [p for p in self._round.contributions if p.message.rank != message.rank]
        if message.flags & Flag.SLICED and self._rule.replies_mean:
            values, slices = self._sliced.values(message, others)
        else:
            values = self._replies.values(message)
            self._sliced.check_dense(message, others)
        if message.sequence <= worker.applied:  # its first reply was lost
            reply = self._result(message, self._round_rows)
            reply.flags |= Flag.DUPLICATE
            self._group.answer(connection, reply, worker)
            return None
        self._enter_round(worker)
        without = numbers_without_gradient(message, self._num_trained)
        self._round.payloads[worker.rank] = Payload(connection, values, message, slices, without)
        self._group.defer(connection, "round", message)
        return None

    def _pull(self, connection: int, message: Message, worker: Worker | None) -> None:
        if not self._decides:
            super()._pull(connection, message, worker)
            return
        if worker is not None:
            worker.pulled_clock = self._group.clock
        reply = Message(Kind.OK, sequence=message.sequence, meta=self._decision)
        self._group.answer(connection, reply, worker)

    def _take_snapshot(self, connection: int, message: Message, worker: Worker) -> None:
        self._center.require_on_workers()
        if message.flags & Flag.WAIT:  # whether to send them
            self._group.defer(connection, "snapshot", message)
            return
        values = self._replies.values(message)
        if self._snapshot.take(message):
            self._replies.preserve()
            np.copyto(self._center.weights, values)
        self._group.answer(connection, Message(Kind.OK), worker)

    def settle(self) -> None:
        """Adds up, completes the round, brings the state to a joiner, takes a snapshot."""
        if {w.reason for w in self._group.waits.values()} <= {"round"}:  # as after most commits
            self._complete_round()
            return
        self._sums.settle([w.rank for w in self._of_a_round()], self._round.payloads)
        self._complete_round()
        self._ask_for_state()
        self._snapshot.settle()
        self._carried.settle()

    def expire(self) -> None:
        self._snapshot.expire()
        self._carried.expire()
        group, limits = self._group, self._group.settings
        missing = self.missing()
        lost = [rank for rank in missing if not group.workers[rank].alive]
        limit_s = limits.start_timeout_s if lost else limits.round_timeout_s
        for connection, wait in group.waiting("round", "sums"):
            since = max([wait.since, *(group.workers[rank].last_seen for rank in lost)])
            if group.now - since > limit_s:
                group.time_out(
                    connection, f"rank {wait.message.rank}'s turn after its commit", missing,
                    limit_s,
                    f"rank {lost[0]} was lost, and no new attempt has joined: are there free slots "
                    "for it? start_timeout_s is how long the others wait" if lost
                    else "raise round_timeout_s?",
                )  # fmt: skip

    def _complete_round(self) -> None:
        group = self._group
        payloads = self._round.payloads
        if not payloads or any(w.rank not in payloads for w in self._of_a_round()):
            return
        finished, self._round = self._round, Round()
        self._transfer.fresh = False
        rows = self._round_rows = finished.rows
        self._round_meta = finished.reply_meta
        self._replies.preserve()
        self._center.apply_round(finished, group.clock)
        group.clock += 1
        if self._decides:
            commits = [p.message for _, p in sorted(payloads.items())]
            self._members = [(m.rank, m.attempt, m.sequence) for m in commits]
            self._round_meta |= self._decision
        self.rounds += 1
        group.orders.latch()
        for rank, payload in sorted(payloads.items()):
            worker, message = group.workers[rank], payload.message
            worker.advance(message)
            worker.pulled_clock = group.clock
            self._position = max(self._position, (message.epoch, message.batch))
            wait = group.waits.get(payload.connection)
            if wait is None or wait.message is not message:
                continue  # its connection broke meanwhile; a resend gets the result
            group.answer(payload.connection, self._result(message, rows), worker)

    def _result(self, request: Message, rows: int) -> Message:
        if request.kind is StoreKind.PUSH:
            return Message(Kind.OK, sequence=request.sequence, rows=rows)
        if self._center.sliced is None:
            reply = self._replies.result(request, rows)
            reply.meta = {**reply.meta, **self._round_meta}
            return reply
        reply = Message(StoreKind.WEIGHTS, sequence=request.sequence, rows=rows)
        reply.meta = dict(self._round_meta)
        body = self._center.slices_for(request)  # a large one is read in chunks
        reply.flags = Flag.SLICED | request.flags & Flag.ENCODED
        if body.size > self.limits.buffer_bytes:
            reply.total = body.size
        else:
            reply.body = body
        return reply

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
