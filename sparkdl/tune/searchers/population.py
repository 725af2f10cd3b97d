"""Population based training (Jaderberg et al., 2017)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from sparkdl.options import require, require_share, require_whole
from sparkdl.tune.searchers.searcher import Searcher, worst_to_best
from sparkdl.tune.segment import Segment
from sparkdl.tune.suggestions import Space, Value

FACTORS = (0.8, 1.2)
"""What a number is multiplied by when it is perturbed."""


class PopulationBasedTraining(Searcher):
    """Trials that are among the worst go on from a copy of one of the best, with other values.

    A trial that is copied over becomes a new trial, whose segment starts from the other one's
    checkpoint. Values of ``build`` that set the model's size must not be asked for: a copy's
    weights would not fit.

    Args:
        population: Trials that train side by side.
        max_epochs: Epochs of each.
        interval: Epochs between two comparisons.
        quantile: Share of the population that counts as best, and as worst.
        resample_probability: How often a value is drawn anew instead of perturbed.
        seed: Of the copies and the perturbations.
    """

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
        self._quantile = quantile
        self._resample = resample_probability
        self._rng = np.random.default_rng(seed)
        self._waiting = deque(Segment(t, 0, min(interval, max_epochs)) for t in range(population))
        self._next = population
        self._scores: dict[int, float] = {}  # of the population as it is now
        self._untrained: set[int] = set()  # copies whose first segment has not ended
        self._given: dict[int, dict[str, Value]] = {}
        self._built: dict[int, tuple[Mapping[str, Space], Mapping[str, Value]]] = {}

    @property
    def max_epochs(self) -> int:
        return self._max_epochs

    def ask(self) -> Segment | None:
        return self._waiting.popleft() if self._waiting else None

    def built(self, trial: int, spaces: Mapping[str, Space], params: Mapping[str, Value]) -> None:
        self._built[trial] = (dict(spaces), dict(params))

    def parameters(self, trial: int) -> Mapping[str, Value]:
        return self._given.get(trial, {})

    def tell(self, trial: int, epochs: int, score: float) -> None:
        self._scores[trial] = worst_to_best(score)
        self._untrained.discard(trial)
        if epochs >= self._max_epochs:
            return
        end = min(epochs + self._interval, self._max_epochs)
        order = sorted(self._scores, key=lambda t: (-self._scores[t], t))
        count = int(len(order) * self._quantile)  # none until enough of the population is known
        worst = order[len(order) - count :]
        # a copy that has not trained yet has its parent's score, and no checkpoint
        best = [t for t in order[:count] if t not in self._untrained]
        if trial not in worst or not best:
            self._waiting.append(Segment(trial, epochs, end))
            return
        parent = best[int(self._rng.integers(len(best)))]
        copy, self._next = self._next, self._next + 1
        self._given[copy] = self._perturbed(parent)
        del self._scores[trial]
        self._scores[copy] = self._scores[parent]
        self._untrained.add(copy)
        self._waiting.append(Segment(copy, epochs, end, parent))

    def is_done(self, trial: int) -> bool:
        copied = {segment.parent for segment in self._waiting}
        return trial not in self._scores and trial not in copied

    def _perturbed(self, parent: int) -> dict[str, Value]:
        spaces, params = self._built[parent]
        return {name: self._other(spaces[name], params[name]) for name in spaces}

    def _other(self, space: Space, value: Value) -> Value:
        if self._rng.random() < self._resample or space.kind == "categorical":
            return space.draw(self._rng)
        factor = FACTORS[int(self._rng.integers(2))]
        return space.nearest(float(value or 0) * factor)
