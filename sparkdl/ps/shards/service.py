"""``ShardService``: the state machine of one shard, which holds a range of the center."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.coordinator.blobs import Assembly
from sparkdl.coordinator.group import Worker
from sparkdl.errors import ProtocolError, SparkDLError
from sparkdl.failures import Failure
from sparkdl.ps.kinds import ROWS, Decision, Member, Range, StoreKind, limits_of
from sparkdl.ps.shards.tables import TableService
from sparkdl.ps.store.center import Center, CenterReplies
from sparkdl.ps.store.rounds import Payload, Round
from sparkdl.rules.rule import Rule
from sparkdl.training.changes import VariableChanges
from sparkdl.training.phases import memory_bytes
from sparkdl.transport.frames import Flag, FrameKind, Kind, Message, error_to_meta
from sparkdl.transport.service import BufferedService, Metric, Replies
from sparkdl.weights import FloatArray

MAX_CHANGES_BYTES = 1 << 34
"""Most bytes that a callback may write to the weights at a time."""


class ShardService(BufferedService):
    """Holds a range of the center, applies commits to it, and answers at once; nobody waits here.

    Where the rule does not wait, a commit counts when it comes: once for each rank, attempt and
    sequence number, and a later attempt of a rank counts from where the former was on this shard.
    Where it waits, commits are put aside until a :class:`Decision` names them.

    Args:
        range_: Which values it holds.
        center: These values; taken over, not copied.
        rule: How commits change them; it works element by element.
        compression: Compression of the run, for this range; None refuses encoded commits.
        tables: The rows of the model's tables that this shard holds; None for a model without.
    """

    idle_s = 600.0

    def __init__(
        self,
        range_: Range,
        center: FloatArray,
        rule: Rule,
        num_workers: int,
        compression: Compression | None = None,
        tables: TableService | None = None,
    ) -> None:
        super().__init__(limits_of(range_.layout, compression))
        self._tables = TableService(()) if tables is None else tables
        self._range, self._rule, self._num_workers = range_, rule, num_workers
        self._center = Center(range_.layout, center, rule, compression)
        self._replies = CenterReplies(self._center, self.limits, compression, self.buffer)
        self._counting = threading.Lock()
        self._busy = 0
        self._workers: dict[int, Worker] = {}
        self._reached: dict[int, tuple[int, int]] = {}  # by the former attempts of a rank
        self._clock = 0
        self._round_rows = 0
        self._staged: dict[int, list[Payload]] = {}
        self._snapshots: dict[tuple[int, int], FloatArray] = {}
        if self._center.on_workers:
            self._snapshots[0, 0] = center
        self._changes = Assembly("what callbacks wrote", MAX_CHANGES_BYTES)
        self._routes: dict[FrameKind, Callable[[int, Message], Message]] = {
            StoreKind.PULL: self._pull,
            StoreKind.STAGE: self._stage,
            StoreKind.RESULT: self._result,
            StoreKind.SNAPSHOT: self._take_snapshot,
            StoreKind.WRITE: self._write,
            StoreKind.TELL: self._tell,
        }

    def disconnect(self, connection: int, now: float) -> Replies:
        """The connection is gone; what its worker has put aside stays."""
        with self.lock:
            self._replies.disconnect(connection)
            return super().disconnect(connection, now)

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        """Takes one request and answers it."""
        if message.kind is StoreKind.TELL:  # which is not part of the work that it tells of
            return self._answered(connection, message, now)
        with self._counting:
            self._busy += 1
        try:
            return self._answered(connection, message, now)
        finally:
            with self._counting:
                self._busy -= 1

    def _answered(self, connection: int, message: Message, now: float) -> Replies:
        try:
            message = self._replies.decoded(connection, message)
            if message.kind in ROWS:
                reply = self._tables.answer(message)
            elif message.kind in (StoreKind.PUSH, StoreKind.PUSH_PULL):
                reply = self._commit(connection, message, now)
            elif message.kind in self._routes:
                with self.lock:
                    self._identify(connection, message, now)
                    reply = self._routes[message.kind](connection, message)
            else:
                raise ProtocolError(
                    "a frame of a kind that a shard does not take",
                    expected=", ".join(sorted(kind.name for kind in self._routes)),
                    received=message.kind.name,
                )
        except SparkDLError as error:
            reply = Message(Kind.ERROR, meta=error_to_meta(error))
        except Exception as error:  # the rule's own code
            reply = Message(Kind.ERROR, meta=error_to_meta(Failure.of(-1, error).worker_error()))
        return [(connection, reply)]

    def metrics(self) -> list[Metric]:
        with self.lock:
            staged = sum(len(commits) for commits in self._staged.values())
            workers = self._workers.values()
            return [
                Metric("clock", "counter", "Commits or rounds applied", self._clock),
                Metric("rows", "counter", "Rows committed", sum(w.rows for w in workers)),
                Metric("bytes_in", "counter", "Bytes received in frames", self.bytes_in),
                Metric("bytes_out", "counter", "Bytes sent in frames", self.bytes_out),
                Metric("busy", "gauge", "Requests being worked on", self._busy),
                Metric("staged", "gauge", "Commits put aside for the open round", staged),
                *self._tables.metrics(),
            ]

    def _identify(self, connection: int, message: Message, now: float) -> Worker | None:
        """The worker that sent a message; None for the driver."""
        if message.rank < 0:
            return None
        worker = self._workers.setdefault(message.rank, Worker(message.rank))
        worker.refuse_superseded(message)
        if worker.attempt not in (None, message.attempt):
            self._replies.forget(worker.rank)
            self._reached[worker.rank] = worker.epoch, worker.batch
        worker.bind(connection, message, now)
        return worker

    def _commit(self, connection: int, message: Message, now: float) -> Message:
        """A commit to a rule that does not wait; with ``lock_free`` applied without the lock."""
        values = self._replies.values(message)
        with self.lock:
            worker = self._identify(connection, message, now)
            if worker is None or self._rule.blocking:
                raise ProtocolError(
                    "a commit that counts at once to a shard that takes none",
                    expected="a worker's, for a rule that does not wait",
                    received=f"rank {message.rank}, rule {self._rule.name!r}",
                )
            again = message.sequence <= worker.applied
            # A former attempt has brought these batches here, and died before it told all servers.
            known = (message.epoch, message.batch) <= self._reached.get(worker.rank, (-1, 0))
            if again or known:
                worker.applied = max(worker.applied, message.sequence)
                worker.pulled_clock = self._clock
                reply = self._replies.weights(connection, message)
                reply.flags |= Flag.DUPLICATE
                return reply
            commit = self._replies.take(worker, message, values, self._clock, self._num_workers)
            self._clock += 1
            if not self._rule.lock_free:
                return self._replies.weights(connection, message)
        self._center.apply(values, commit)
        return self._replies.weights(connection, message)

    def _pull(self, connection: int, message: Message) -> Message:
        decision = Decision.in_meta(message.meta)
        self._follow(decision)
        if self._center.on_workers:
            values = self._snapshot_at(decision.position)
            return Message(StoreKind.WEIGHTS, body=values.view(np.uint8))
        if message.rank >= 0:
            self._workers[message.rank].pulled_clock = self._clock
            self._center.pulled(message.rank)
        return self._replies.weights(connection, message)

    def _stage(self, connection: int, message: Message) -> Message:
        """Puts a commit aside; a former one of this rank stays until no decision can name it."""
        payload = Payload(connection, self._replies.values(message), message)
        former = self._staged.get(message.rank, [])
        own = [staged for staged in former if staged.message.attempt != message.attempt]
        self._staged[message.rank] = [*own, payload]
        return Message(Kind.OK, sequence=message.sequence)

    def _result(self, connection: int, message: Message) -> Message:
        self._follow(Decision.in_meta(message.meta))
        return self._replies.result(message, self._round_rows)

    def _tell(self, connection: int, message: Message) -> Message:
        numbers = {metric.name: metric.value for metric in self.metrics()}
        return Message(Kind.OK, meta={"numbers": numbers, "memory_bytes": memory_bytes()})

    def _follow(self, decision: Decision) -> None:
        """Applies the round that is decided, unless this shard has."""
        if not self._rule.blocking or not decision.follows(self._clock):
            return
        round_ = Round()
        for member in decision.members:
            round_.payloads[member[0]] = self._staged_of(member)
        self._round_rows = round_.rows
        self._replies.preserve()
        self._center.apply_round(round_, self._clock)
        self._clock += 1
        for rank, _, _ in decision.members:
            worker = self._workers[rank]
            worker.advance(round_.payloads[rank].message)
            worker.pulled_clock = self._clock
        self._staged.clear()  # whoever was not named begins again with the next round

    def _staged_of(self, member: Member) -> Payload:
        rank, attempt, sequence = member
        for staged in self._staged.get(rank, []):
            if (staged.message.attempt, staged.message.sequence) == (attempt, sequence):
                return staged
        raise ProtocolError(
            f"the commit of rank {rank} to a round is not on this shard",
            expected=f"commit {sequence} of attempt {attempt}", received="none",
        )  # fmt: skip

    def _take_snapshot(self, connection: int, message: Message) -> Message:
        """Keeps the weights of a position beside those of the last that was decided."""
        self._center.require_on_workers()
        decided = Decision.in_meta(message.meta).position
        values = self._replies.values(message).copy()
        kept = {decided: self._snapshots[decided]} if decided in self._snapshots else {}
        self._snapshots = {**kept, (message.epoch, message.batch): values}
        return Message(Kind.OK)

    def _snapshot_at(self, position: tuple[int, int]) -> FloatArray:
        if position not in self._snapshots:
            raise ProtocolError(
                "the weights of a position are not on this shard",
                expected=f"those of epoch {position[0]}, batch {position[1]}",
                received=f"{sorted(self._snapshots)}",
            )
        return self._snapshots[position]

    def _write(self, connection: int, message: Message) -> Message:
        whole = self._changes.put(replace(message, rank=-1, attempt=0))
        if whole is not None:
            changes = VariableChanges.from_bytes(whole.tobytes())
            kept = self._snapshots.items()
            self._snapshots = {at: self._range.written(changes, values) for at, values in kept}
            if not self._center.on_workers:
                self._replies.preserve()
                weights = self._center.weights
                np.copyto(weights, self._range.written(changes, weights))
        return Message(Kind.OK)
