"""Population based training (Jaderberg et al., 2017)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require, require_share, require_whole
from sparkdl.tune.searchers.searcher import WORST, Searcher, Segment, worst_to_best
from sparkdl.tune.suggestions import Space, Value

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
        seed: Of the copies and the perturbations.
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
                self._given[self._members[place]] = self._perturbed(parent)
                self._parents[self._members[place]] = (parent, epochs)
            self._waiting.append(Segment(self._members[place], epochs, end, parent))
        self._scores = {}

    def _perturbed(self, parent: int) -> dict[str, Value]:
        spaces, params = self._built[parent]
        return {name: self._other(spaces[name], params[name]) for name in spaces}

    def _other(self, space: Space, value: Value) -> Value:
        if self._rng.random() < self._resample or space.kind == "categorical":
            return space.draw(self._rng)
        factor = FACTORS[int(self._rng.integers(2))]
        return space.nearest(float(value or 0) * factor)
