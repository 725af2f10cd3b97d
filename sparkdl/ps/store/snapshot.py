"""Which of the workers that hold the weights sends them to the server, and of when they are."""

from __future__ import annotations

from sparkdl.coordinator.group import Group
from sparkdl.transport.frames import Flag, Kind, Message


class Snapshot:
    """The weights of a position (epoch, batch) come from one worker; all others wait until then.

    Weights are equal on all workers, so the first that asks sends them, and the next one if that
    one dies; but seeds and counters are those of a worker that has taken every step of the epoch.
    Only if no such worker is there another one sends. No worker goes on from a position before its
    weights are here, so no death loses them.

    Args:
        group: The run's.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sender: int | None = None
        self.position = (0, 0)

    def take(self, message: Message) -> bool:
        """Whether the weights that come with ``message`` are newer than those that are here."""
        position = (message.epoch, message.batch)
        if position <= self.position:
            return False  # sent again, or by a worker that was silent while the others went on
        self.position, self._sender = position, None
        return True

    def settle(self) -> None:
        """Answers those who ask whether to send the weights: one is told to."""
        waiting = list(self._group.waiting("snapshot"))
        asked = {wait.message.rank: bool(wait.message.batches) for _, wait in waiting}
        for connection, wait in waiting:
            message, reply = wait.message, Message(Kind.OK)
            if (message.epoch, message.batch) > self.position:
                if self._sender is None and not asked[message.rank] and self._to_come(asked):
                    continue
                if self._sender not in (None, message.rank):
                    continue
                self._sender, reply.flags = message.rank, Flag.UPLOAD
            self._group.answer(connection, reply, self._group.workers[message.rank])

    def _to_come(self, asked: dict[int, bool]) -> list[int]:
        """Ranks that may have taken every step of the epoch, and send the weights.

        Args:
            asked: Rank that waits -> whether it has.
        """
        present = [w.rank for w in self._group.workers.values() if w.alive and not w.finished]
        return [rank for rank in present if asked.get(rank, True)]

    def expire(self) -> None:
        """Ends the waits for a worker that lives and does not send."""
        group, limit_s = self._group, self._group.settings.round_timeout_s
        waiting = list(group.waiting("snapshot"))
        asked = {wait.message.rank: bool(wait.message.batches) for _, wait in waiting}
        missing = self._to_come(asked) if self._sender is None else [self._sender]
        for connection, wait in waiting:
            if group.now - wait.since > limit_s and missing:
                group.time_out(
                    connection, "the weights after the last round", missing, limit_s,
                    "raise round_timeout_s?",
                )  # fmt: skip

    def leave(self, rank: int) -> None:
        """``rank`` is dead or done: it sends nothing any more."""
        if self._sender == rank:
            self._sender = None
