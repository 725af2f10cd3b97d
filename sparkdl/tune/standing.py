"""``Standing``: which epoch's model a trial stands for, while one of its segments trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sparkdl.progress.events import Metrics
from sparkdl.tune.goal import Goal
from sparkdl.tune.journal import TrialRecord
from sparkdl.tune.searchers.searcher import WORST


class Standing:
    """The epoch that a trial stands for: its latest one, or its best one.

    Used by the thread that trains the segment, and after its end by that of the search.

    Args:
        goal: The metric.
        best: Its best epoch, and not the latest.
        record: What is known of the trial; None for a new one.
        begin: Epochs that the segment begins after.
        copied: Epochs after which another trial takes over this one's checkpoint.
    """

    def __init__(
        self,
        goal: Goal,
        best: bool,
        record: TrialRecord | None,
        begin: int,
        copied: Collection[int],
    ) -> None:
        self._goal, self._best = goal, best
        self._needed = {begin, *copied} - {0}
        self._latest = 0
        self.epoch, self.metrics, self._score = 0, dict[str, float](), WORST
        if record is not None and record.kept_metrics:
            self.epoch, self.metrics = record.kept_epoch, record.kept_metrics
            self._score = goal.score(self.metrics) if best else WORST

    def hear(self, epochs: int, metrics: Metrics) -> bool:
        """An epoch has ended; whether its checkpoint is to be kept.

        Args:
            epochs: Epochs that are done.
            metrics: As after the last of them.
        """
        self._latest = epochs
        return self._best and self._take(epochs, _numbers(metrics))

    def end(self, epochs: int, metrics: Mapping[str, float]) -> None:
        """The segment has ended.

        Args:
            epochs: Its end; fewer are done where a callback of the user stopped it.
            metrics: As after the last epoch.
        """
        self._latest = self._latest or epochs
        self._take(self._latest, dict(metrics))

    @property
    def needed(self) -> frozenset[int]:
        """The epochs whose checkpoints must stay, beside the newest."""
        return frozenset({*self._needed, self.epoch} - {0})

    def needed_after(self, copied: Collection[int]) -> frozenset[int]:
        """The same after the segment's end.

        Args:
            copied: As for the constructor, at this time.
        """
        return frozenset({self._latest, self.epoch, *copied} - {0})

    def _take(self, epochs: int, metrics: dict[str, float]) -> bool:
        score = self._goal.score(metrics) if self._goal.metric in metrics else WORST
        better = score > self._score
        if better:
            self.epoch, self.metrics, self._score = epochs, metrics, score
        return better


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))
    }
