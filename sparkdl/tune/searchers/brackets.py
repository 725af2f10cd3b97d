"""Searchers that give a trial epochs by what it has reached.

Asynchronous successive halving (Li et al., MLSys 2020), by promotion and by stopping; several
searchers side by side: adaptive ASHA, Hyperband; population based training.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require, require_one_of, require_share, require_whole
from sparkdl.tune.searchers.searcher import WORST, Searcher, Segment, worst_to_best
from sparkdl.tune.suggestions import Space, Value


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
        min_early_stopping_rate: The lowest rungs that are left out: no trial ends at them.
    """

    _all_rungs = False

    @lists_its_arguments
    def __init__(
        self, max_trials: int = 64, max_epochs: int = 27, divisor: float = 4, max_rungs: int = 5,
        min_early_stopping_rate: int = 0,
    ) -> None:  # fmt: skip
        owner = type(self).__name__
        _check(owner, max_trials, max_epochs, divisor, max_rungs)
        require_whole(owner, "min_early_stopping_rate", min_early_stopping_rate, 0)
        if not self._all_rungs:
            max_rungs = rungs_that_differ(max_rungs, divisor, max_epochs, max_trials)
        rungs = make_rungs(max_rungs, divisor, max_epochs)
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
        segment = self._promotion(self._divisor) or self._new_trial() or self._last_promotion()
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

    def _promotion(self, divisor: float) -> Segment | None:
        for number in reversed(range(len(self.rungs) - 1)):
            rung = self.rungs[number]
            for trial in rung.best(int(len(rung.scores) / divisor)):
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
        return None if self._running or self.rungs[-1].best(1) else self._promotion(1)

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


class _Brackets(Searcher):
    """Several searchers side by side, each with trials of its own.

    A free slot goes to the first searcher that has a segment; trials are numbered as they begin.
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

    _all_rungs = True


class AdaptiveAsha(_Brackets):
    """ASHA with several ladders: some stop early, others late, as the best choice is not known.

    Args:
        max_trials: Trials of all ladders.
        max_epochs, divisor: As those of :class:`Asha`.
        max_rungs: Rungs of the longest ladder.
        mode: ``'aggressive'`` (only the longest ladder), ``'standard'`` (ladders down to half its
            rungs) or ``'conservative'`` (down to one rung, on which all are trained to the end).
    """

    @lists_its_arguments
    def __init__(
        self, max_trials: int = 64, max_epochs: int = 27, divisor: float = 4, max_rungs: int = 5,
        mode: str = "standard",
    ) -> None:  # fmt: skip
        require_one_of("AdaptiveAsha", "mode", mode, ("aggressive", "standard", "conservative"))
        _check("AdaptiveAsha", max_trials, max_epochs, divisor, max_rungs)
        longest = rungs_that_differ(max_rungs, divisor, max_epochs, max_trials)
        shortest = {"aggressive": longest, "standard": (longest - 1) // 2 + 1, "conservative": 1}
        rungs = list(range(longest, shortest[mode] - 1, -1))[:max_trials]
        ladders = zip(trials_of_brackets(max_trials, divisor, rungs), rungs, strict=True)
        super().__init__([_Ladder(t, max_epochs, divisor, r) for t, r in ladders])


class Hyperband(_Brackets):
    """Successive halving in brackets, each rung full before any trial goes on.

    Li et al., JMLR 2018. Bracket ``s`` begins with ``(s_max + 1) / (s + 1) * divisor ** s`` trials
    of ``max_epochs / divisor ** s`` epochs. A trial that fails is replaced: on the first rung by a
    new one, on a later one by the next best of the rung before.

    Args:
        max_epochs, divisor: As those of :class:`Asha`.
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


FACTORS = (0.8, 1.2)
"""The factors by which a number is perturbed."""


class PopulationBasedTraining(Searcher):
    """Trials that are among the worst go on from a copy of one of the best, with other values.

    It goes by rounds: when the whole population has trained ``interval`` epochs, a copy takes the
    place of each of the worst, as a new trial whose segment starts from the other one's checkpoint
    of that moment, and then all train on. So the same seed gives the same trials, whichever of
    them ends first. A copy has the learning rate of its own values, and all else of the optimizer
    from the checkpoint. Values of ``build`` that set the model's size must not be asked for: a
    copy's weights would not fit.

    A trial that fails goes no further: in the first round a new one takes its place, at most as
    many times as there are trials; in later ones a copy does.

    Args:
        population: Trials that train side by side.
        max_epochs: Epochs of each.
        interval: Epochs between two comparisons.
        quantile: Share of the population that counts as best, and as worst.
        resample_probability: How often a value is drawn anew instead of perturbed.
        seed: Seed of the copies and the perturbations.
    """

    @lists_its_arguments
    def __init__(
        self, population: int = 8, max_epochs: int = 30, interval: int = 5, quantile: float = 0.25,
        resample_probability: float = 0.25, seed: int = 0,
    ) -> None:  # fmt: skip
        owner = "PopulationBasedTraining"
        require_whole(owner, "population", population, 2)
        require_whole(owner, "max_epochs", max_epochs, 1)
        require_whole(owner, "interval", interval, 1)
        require_share(owner, "quantile", quantile)
        require(
            1 / population <= quantile <= 0.5, owner, "quantile",
            f"from 1/population ({1 / population:g}) to 0.5", quantile,
        )  # fmt: skip
        self._max_epochs, self._interval = max_epochs, interval
        self._count = int(population * quantile)
        self._resample = resample_probability
        self._rng = np.random.default_rng(seed)
        self._waiting = deque(Segment(t, 0, min(interval, max_epochs)) for t in range(population))
        self._members = list(range(population))
        self._next, self._limit = population, 2 * population
        self._scores: dict[int, float] = {}  # of the round
        self._ended: set[int] = set()  # members that train no more
        self._parents: dict[int, tuple[int, int]] = {}  # copy that was not told -> its checkpoint
        self._given: dict[int, dict[str, Value]] = {}
        self._built: dict[int, tuple[Mapping[str, Space], Mapping[str, Value]]] = {}

    @property
    def max_epochs(self) -> int:
        return self._max_epochs

    @property
    def expected_epochs(self) -> int:
        return len(self._members) * self._max_epochs

    def ask(self) -> Segment | None:
        return self._waiting.popleft() if self._waiting else None

    def built(self, trial: int, spaces: Mapping[str, Space], params: Mapping[str, Value]) -> None:
        self._built[trial] = (dict(spaces), dict(params))

    def parameters(self, trial: int) -> Mapping[str, Value]:
        return self._given.get(trial, {})

    def tell(self, trial: int, epochs: int, score: float) -> None:
        self._scores[trial] = worst_to_best(score)
        self._parents.pop(trial, None)
        first = epochs == min(self._interval, self._max_epochs)
        if self._scores[trial] == WORST and first and self._next < self._limit:
            place = self._members.index(trial)
            del self._scores[trial]
            self._members[place], self._next = self._next, self._next + 1
            self._waiting.append(Segment(self._members[place], 0, epochs))
        if epochs >= self._max_epochs:
            self._ended.add(trial)
        elif len(self._scores) == len(self._members):
            self._begin_round(epochs)

    def is_done(self, trial: int) -> bool:
        goes_on = trial in self._members and trial not in self._ended
        return not goes_on and not self.copied_after(trial)

    def copied_after(self, trial: int) -> frozenset[int]:
        return frozenset(after for parent, after in self._parents.values() if parent == trial)

    def _begin_round(self, epochs: int) -> None:
        """The population trains on, the worst of it as copies of the best."""
        order = sorted(self._members, key=lambda t: (-self._scores[t], t))
        well = [t for t in order if self._scores[t] > WORST]
        best = well[: self._count]
        if not best:
            self._ended.update(self._members)
            return
        worst = {*order[max(len(best), len(order) - self._count) :], *order[len(well) :]}
        end = min(epochs + self._interval, self._max_epochs)
        for place, trial in enumerate(self._members):
            parent = None
            if trial in worst:
                parent = best[int(self._rng.integers(len(best)))]
                self._members[place], self._next = self._next, self._next + 1
                spaces, params = self._built[parent]
                other = {name: self._other(spaces[name], params[name]) for name in spaces}
                self._given[self._members[place]] = other
                self._parents[self._members[place]] = (parent, epochs)
            self._waiting.append(Segment(self._members[place], epochs, end, parent))
        self._scores = {}

    def _other(self, space: Space, value: Value) -> Value:
        if self._rng.random() < self._resample or space.kind == "categorical":
            return space.draw(self._rng)
        return space.nearest(float(value or 0) * FACTORS[int(self._rng.integers(2))])
