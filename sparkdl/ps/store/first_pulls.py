"""The first pulls of workers that begin together: all of them get the same center."""

from __future__ import annotations

from sparkdl.coordinator.group import Group, Wait


class FirstPulls:
    """Holds the first pulls back until all workers that were let in together have asked.

    Otherwise one that is slow to pull would begin with a center that holds what the others trained
    meanwhile: with short epochs, all of it.

    Args:
        group: The run's.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks: set[int] = set()

    def expect(self, rank: int) -> None:
        """A worker was let in with others, and will pull."""
        self._ranks.add(rank)

    def __contains__(self, rank: int) -> bool:
        """Whether the next pull of ``rank`` is held back."""
        return rank in self._ranks

    def forget(self, rank: int) -> None:
        """Nobody waits for ``rank``: it is gone, or commits without a pull."""
        self._ranks.discard(rank)

    def expire(self) -> None:
        """Nobody is waited for any more, if one has waited as long as for the workers to come."""
        limit_s = self._group.settings.gather_s
        if any(self._group.now - w.since > limit_s for _, w in self._group.waiting("begin")):
            self._ranks.clear()

    def take(self) -> list[tuple[int, Wait]]:
        """The pulls to be answered now."""
        waits = self._group.waiting("begin")
        if self._ranks - {wait.message.rank for _, wait in waits}:
            return []
        self._ranks.clear()
        return waits
