"""Asynchronous successive halving (Li et al., MLSys 2020), by promotion and by stopping."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field

from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require, require_whole
from sparkdl.tune.searchers.searcher import WORST, Searcher, Segment, worst_to_best


def make_rungs(number: int, divisor: float, max_epochs: int) -> list[int]:
    """The epochs of each rung, each ``divisor`` times the one before.

    >>> make_rungs(3, 3, 9), make_rungs(4, 2, 10)
    ([1, 3, 9], [1, 2, 5, 10])
    """
    return [max(int(max_epochs / divisor ** (number - 1 - r)), 1) for r in range(number)]


def trials_of_brackets(max_trials: int, divisor: float, rungs: list[int]) -> list[int]:
    """How many trials each bracket begins with, so that each trains about as many epochs.

    >>> trials_of_brackets(50, 3, [4, 3]), trials_of_brackets(100, 4, [4, 3, 2])
    ([35, 15], [70, 22, 8])
    """
    weights = [divisor ** (number - 1) / number for number in rungs]
    trials = [max(int(max_trials * w / sum(weights)), 1) for w in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    return trials


def rungs_that_differ(max_rungs: int, divisor: float, max_epochs: int, max_trials: int) -> int:
    """``max_rungs``, or fewer where epochs or trials do not suffice."""
    room = min(math.log(max_epochs, divisor), math.log(max_trials, divisor))
    return max(1, min(max_rungs, int(room + 1e-9) + 1))


def epochs_of_rungs(trials: list[int], epochs: list[int]) -> int:
    """The epochs of all trials, where rung ``i`` has ``trials[i]`` trials until ``epochs[i]``.

    >>> epochs_of_rungs([9, 3, 1], [1, 3, 9])
    21
    """
    before = [0, *epochs[:-1]]
    return sum(n * (end - begin) for n, begin, end in zip(trials, before, epochs, strict=True))


@dataclass
class _Rung:
    """The trials that were compared after a number of epochs."""

    epochs: int
    scores: list[tuple[float, int, int]] = field(default_factory=list)
    promoted: set[int] = field(default_factory=set)

    def add(self, trial: int, score: float) -> None:
        bisect.insort(self.scores, (-worst_to_best(score), len(self.scores), trial))

    def best(self, count: int) -> list[int]:
        """The ``count`` best trials that did not fail; among equal ones those that came first."""
        return [trial for score, _, trial in self.scores[:count] if -score > WORST]


class Asha(Searcher):
    """Trials climb rungs; of each rung only the best ``1 / divisor`` go on, when they are known.

    A free slot goes to the highest rung that has a trial to promote, else to a new trial, so that
    none waits for a rung to be full. At least one trial is trained to the end.

    Args:
        max_trials: Trials; one that fails is replaced, at most as many times.
        max_epochs: Epochs of a trial that is trained to the end.
        divisor: One trial in this number goes on from a rung.
        max_rungs: Most rungs; fewer where epochs or trials are too few.
        min_early_stopping_rate: The lowest rungs that are left out: no trial ends before the
            one above them.
    """

    @lists_its_arguments
    def __init__(
        self, max_trials: int = 64, max_epochs: int = 27, divisor: float = 4, max_rungs: int = 5,
        min_early_stopping_rate: int = 0,
    ) -> None:  # fmt: skip
        owner = type(self).__name__
        _check(owner, max_trials, max_epochs, divisor, max_rungs)
        require_whole(owner, "min_early_stopping_rate", min_early_stopping_rate, 0)
        rungs = self._rungs_of(max_trials, max_epochs, divisor, max_rungs)
        left_out = min(min_early_stopping_rate, len(rungs) - 1)
        self.rungs = [_Rung(epochs) for epochs in rungs[left_out:]]
        self._divisor = divisor
        self._max_trials, self._limit = max_trials, 2 * max_trials
        self._started = 0
        self._running: set[int] = set()
        self._failed: set[int] = set()

    @property
    def max_epochs(self) -> int:
        return self.rungs[-1].epochs

    @property
    def expected_epochs(self) -> int:
        counts = [max(int(self._max_trials / self._divisor**n), 1) for n in range(len(self.rungs))]
        return epochs_of_rungs(counts, [rung.epochs for rung in self.rungs])

    def ask(self) -> Segment | None:
        segment = self._promotion() or self._new_trial() or self._last_promotion()
        if segment is not None:
            self._running.add(segment.trial)
        return segment

    def tell(self, trial: int, epochs: int, score: float) -> None:
        self._running.discard(trial)
        rung = next(r for r in self.rungs if r.epochs == epochs)
        rung.add(trial, score)
        if worst_to_best(score) == WORST:
            self._failed.add(trial)
            self._max_trials = min(self._max_trials + 1, self._limit)

    def is_done(self, trial: int) -> bool:
        return trial in self._failed or any(t == trial for _, _, t in self.rungs[-1].scores)

    def _rungs_of(
        self, max_trials: int, max_epochs: int, divisor: float, max_rungs: int
    ) -> list[int]:
        number = rungs_that_differ(max_rungs, divisor, max_epochs, max_trials)
        return make_rungs(number, divisor, max_epochs)

    def _promotion(self) -> Segment | None:
        for number in reversed(range(len(self.rungs) - 1)):
            rung = self.rungs[number]
            for trial in rung.best(int(len(rung.scores) / self._divisor)):
                if trial not in rung.promoted:
                    return self._promote(number, trial)
        return None

    def _new_trial(self) -> Segment | None:
        if self._started >= self._max_trials:
            return None
        self._started += 1
        return Segment(self._started - 1, 0, self.rungs[0].epochs)

    def _last_promotion(self) -> Segment | None:
        """Lets the best trial go on to the end, if rungs are too small to promote from."""
        if self._running or self.rungs[-1].best(1):
            return None
        for number in reversed(range(len(self.rungs) - 1)):
            rung = self.rungs[number]
            for trial in rung.best(len(rung.scores)):
                if trial not in rung.promoted:
                    return self._promote(number, trial)
        return None

    def _promote(self, number: int, trial: int) -> Segment:
        self.rungs[number].promoted.add(trial)
        return Segment(trial, self.rungs[number].epochs, self.rungs[number + 1].epochs)


class AshaStopping(Asha):
    """Trials go on unless they are below the best ``1 / divisor`` of a rung when they reach it.

    The first trials are compared with few others, so more of them go on than by promotion, but no
    trial is ever paused. The other arguments are those of :class:`Asha`.

    Args:
        bootstrap_count: The number of trials that end at a rung before one may go on from it.
    """

    @lists_its_arguments
    def __init__(
        self, max_trials: int = 64, max_epochs: int = 27, divisor: float = 4, max_rungs: int = 5,
        min_early_stopping_rate: int = 0, bootstrap_count: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(max_trials, max_epochs, divisor, max_rungs, min_early_stopping_rate)
        require_whole("AshaStopping", "bootstrap_count", bootstrap_count, 0)
        require(
            bootstrap_count < max_trials, "AshaStopping", "bootstrap_count",
            f"fewer than max_trials ({max_trials})", bootstrap_count,
        )  # fmt: skip
        self._bootstrap_count = bootstrap_count
        self._going_on: deque[Segment] = deque()

    def ask(self) -> Segment | None:
        segment = self._going_on.popleft() if self._going_on else self._new_trial()
        if segment is not None:
            self._running.add(segment.trial)
        return segment

    def tell(self, trial: int, epochs: int, score: float) -> None:
        super().tell(trial, epochs, score)
        number = next(n for n, r in enumerate(self.rungs) if r.epochs == epochs)
        rung = self.rungs[number]
        best = rung.best(max(int(len(rung.scores) / self._divisor), 1))
        enough = len(rung.scores) > self._bootstrap_count
        if number < len(self.rungs) - 1 and enough and trial in best:
            self._going_on.append(self._promote(number, trial))

    def is_done(self, trial: int) -> bool:
        waiting = {segment.trial for segment in self._going_on}
        return trial not in self._running and trial not in waiting


def _check(owner: str, max_trials: int, max_epochs: int, divisor: float, max_rungs: int) -> None:
    require_whole(owner, "max_trials", max_trials, 1)
    require_whole(owner, "max_epochs", max_epochs, 1)
    require_whole(owner, "max_rungs", max_rungs, 1)
    require(divisor > 1, owner, "divisor", "a number above 1", divisor)
