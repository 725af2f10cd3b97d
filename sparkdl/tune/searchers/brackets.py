"""Searchers of several ladders: adaptive ASHA, and Hyperband."""

from __future__ import annotations

import math

from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require, require_one_of, require_whole
from sparkdl.tune.searchers.asha import (
    Asha,
    epochs_of_rungs,
    make_rungs,
    rungs_that_differ,
    trials_of_brackets,
)
from sparkdl.tune.searchers.searcher import WORST, Searcher, Segment, worst_to_best

_MODES = ("aggressive", "standard", "conservative")


class _Brackets(Searcher):
    """Several searchers side by side, each with trials of its own.

    A free slot goes to the first searcher that has a segment; trials are numbered in the order in
    which they begin.
    """

    def __init__(self, brackets: list[Searcher]) -> None:
        self.brackets = brackets
        self._homes: list[tuple[int, int]] = []
        self._numbers: dict[tuple[int, int], int] = {}

    @property
    def max_epochs(self) -> int:
        return max(bracket.max_epochs for bracket in self.brackets)

    @property
    def expected_epochs(self) -> int | None:
        known = [b.expected_epochs for b in self.brackets]
        return None if None in known else sum(n or 0 for n in known)

    def ask(self) -> Segment | None:
        for place, bracket in enumerate(self.brackets):
            segment = bracket.ask()
            if segment is not None:
                home = (place, segment.trial)
                if home not in self._numbers:
                    self._numbers[home] = len(self._homes)
                    self._homes.append(home)
                return Segment(self._numbers[home], segment.begin, segment.end)
        return None

    def tell(self, trial: int, epochs: int, score: float) -> None:
        place, inner = self._homes[trial]
        self.brackets[place].tell(inner, epochs, score)

    def is_done(self, trial: int) -> bool:
        place, inner = self._homes[trial]
        return self.brackets[place].is_done(inner)


class _Ladder(Asha):
    """ASHA with exactly ``max_rungs`` rungs, however few its own trials are."""

    def _rungs_of(
        self, max_trials: int, max_epochs: int, divisor: float, max_rungs: int
    ) -> list[int]:
        return make_rungs(max_rungs, divisor, max_epochs)


class AdaptiveAsha(_Brackets):
    """ASHA with several ladders: some stop early, others late, as the best choice is not known.

    Args:
        max_trials: Trials of all ladders.
        max_epochs: Epochs of a trial that is trained to the end.
        divisor: One trial in this number goes on from a rung.
        max_rungs: Rungs of the longest ladder.
        mode: ``'aggressive'`` (only the longest ladder), ``'standard'`` (ladders down to half its
            rungs) or ``'conservative'`` (down to one rung, on which all are trained to the end).
    """

    @lists_its_arguments
    def __init__(
        self, max_trials: int = 64, max_epochs: int = 27, divisor: float = 4, max_rungs: int = 5,
        mode: str = "standard",
    ) -> None:  # fmt: skip
        require_one_of("AdaptiveAsha", "mode", mode, _MODES)
        require_whole("AdaptiveAsha", "max_trials", max_trials, 1)
        require_whole("AdaptiveAsha", "max_epochs", max_epochs, 1)
        require(divisor > 1, "AdaptiveAsha", "divisor", "a number above 1", divisor)
        longest = rungs_that_differ(max_rungs, divisor, max_epochs, max_trials)
        shortest = {"aggressive": longest, "standard": (longest - 1) // 2 + 1, "conservative": 1}
        rungs = list(range(longest, shortest[mode] - 1, -1))[:max_trials]
        trials = trials_of_brackets(max_trials, divisor, rungs)
        super().__init__(
            [_Ladder(t, max_epochs, divisor, r) for t, r in zip(trials, rungs, strict=True)]
        )


class Hyperband(_Brackets):
    """Successive halving in brackets, each rung full before any trial goes on.

    Li et al., JMLR 2018. Bracket ``s`` begins with ``(s_max + 1) / (s + 1) * divisor ** s`` trials
    of ``max_epochs / divisor ** s`` epochs. A trial that fails is replaced: on the first rung by a
    new one, on a later one by the next best of the rung before.

    Args:
        max_epochs: Epochs of a trial that is trained to the end.
        divisor: One trial in this number goes on from a rung.
    """

    @lists_its_arguments
    def __init__(self, max_epochs: int = 27, divisor: int = 3) -> None:
        require_whole("Hyperband", "max_epochs", max_epochs, 1)
        require_whole("Hyperband", "divisor", divisor, 2)
        highest = int(math.log(max_epochs, divisor) + 1e-9)
        brackets: list[Searcher] = []
        for s in range(highest, -1, -1):
            trials = math.ceil((highest + 1) / (s + 1) * divisor**s)
            counts = [max(trials // divisor**i, 1) for i in range(s + 1)]
            epochs = [max(max_epochs // divisor ** (s - i), 1) for i in range(s + 1)]
            brackets.append(SuccessiveHalving(counts, epochs))
        super().__init__(brackets)


class SuccessiveHalving(Searcher):
    """All trials of a rung end before the best of them go on (Jamieson and Talwalkar, 2016).

    A trial that fails goes no further. On the first rung a new one takes its place, at most as
    many times as there are trials; on a later one the next best of the rung before does.

    Args:
        trials: How many each rung has.
        epochs: How many each rung ends after.
    """

    def __init__(self, trials: list[int], epochs: list[int]) -> None:
        require(
            len(trials) == len(epochs) > 0, "SuccessiveHalving", "trials",
            "as many numbers as epochs", trials,
        )  # fmt: skip
        self._trials, self._epochs = trials, epochs
        self._rung = 0
        self._started, self._limit = trials[0], 2 * trials[0]
        self._waiting = list(range(trials[0]))
        self._untold = set(self._waiting)  # of the rung
        self._scores: dict[int, float] = {}  # of those of the rung that did not fail
        self._next_best: list[int] = []  # of the rung before

    @property
    def max_epochs(self) -> int:
        return self._epochs[-1]

    @property
    def expected_epochs(self) -> int:
        return epochs_of_rungs(self._trials, self._epochs)

    def ask(self) -> Segment | None:
        if not self._waiting:
            return None
        begin = 0 if self._rung == 0 else self._epochs[self._rung - 1]
        return Segment(self._waiting.pop(0), begin, self._epochs[self._rung])

    def tell(self, trial: int, epochs: int, score: float) -> None:
        self._untold.discard(trial)
        if worst_to_best(score) > WORST:
            self._scores[trial] = score
        else:
            self._replace()
        if self._untold:
            return
        self._next_best = []
        if self._rung < len(self._epochs) - 1:
            order = sorted(self._scores, key=lambda t: (-self._scores[t], t))
            self._rung += 1
            count = self._trials[self._rung]
            self._waiting = sorted(order[:count])
            self._next_best = order[count : 2 * count]
            self._untold = set(self._waiting)
            self._scores = {}

    def is_done(self, trial: int) -> bool:
        on_last = self._rung == len(self._epochs) - 1
        may_go_on = trial in self._untold or trial in self._next_best
        return not may_go_on and (on_last or trial not in self._scores)

    def _replace(self) -> None:
        if self._rung == 0 and self._started < self._limit:
            found, self._started = self._started, self._started + 1
        elif self._next_best:
            found = self._next_best.pop(0)
        else:
            return
        self._waiting.append(found)
        self._untold.add(found)
