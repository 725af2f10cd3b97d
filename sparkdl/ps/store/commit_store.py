"""The store of a rule that does not wait: each commit changes the center when it comes."""

from __future__ import annotations

from sparkdl.codecs import Compression
from sparkdl.coordinator.group import Group, Wait, Work, Worker
from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.store.center import ParameterStore
from sparkdl.rules.rule import Rule
from sparkdl.transport.frames import Flag, Message
from sparkdl.weights import FloatArray, Layout


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
        if message.sequence <= worker.applied:  # its first reply was lost
            if self._gated:
                group.defer(connection, "gate", message)
            else:
                reply = self._replies.weights(connection, message)
                reply.flags |= Flag.DUPLICATE
                group.answer(connection, reply, worker)
            return None
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
        else:
            group.answer(connection, self._replies.weights(connection, message), worker)
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
