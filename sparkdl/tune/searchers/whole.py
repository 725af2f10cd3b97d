"""Searchers that train each trial to the end: one, at random, or all of a grid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require, require_whole
from sparkdl.tune.searchers.searcher import WORST, Searcher, Segment
from sparkdl.tune.suggestions import Value


class RandomSearch(Searcher):
    """Every trial with values of its own, drawn at random (Bergstra and Bengio, JMLR 2012).

    Args:
        max_trials: Trials; one that fails is replaced, at most as many times.
        max_epochs: Epochs of each.
    """

    @lists_its_arguments
    def __init__(self, max_trials: int = 16, max_epochs: int = 10) -> None:
        owner = type(self).__name__
        require_whole(owner, "max_trials", max_trials, 1)
        require_whole(owner, "max_epochs", max_epochs, 1)
        self._max_trials, self._max_epochs = max_trials, max_epochs
        self._limit = 2 * max_trials
        self._started = 0

    @property
    def max_epochs(self) -> int:
        return self._max_epochs

    @property
    def expected_epochs(self) -> int:
        return self._max_trials * self._max_epochs

    def ask(self) -> Segment | None:
        if self._started >= self._max_trials:
            return None
        self._started += 1
        return Segment(self._started - 1, 0, self._max_epochs)

    def is_done(self, trial: int) -> bool:
        return True  # a trial is one segment

    def tell(self, trial: int, epochs: int, score: float) -> None:
        if not score > WORST and self._max_trials < self._limit:
            self._max_trials += 1


class Single(RandomSearch):
    """One trial, trained to the end.

    Args:
        max_epochs: Its epochs.
    """

    @lists_its_arguments
    def __init__(self, max_epochs: int = 10) -> None:
        super().__init__(1, max_epochs)
        self._limit = 1


class Grid(RandomSearch):
    """Every combination of the values of a grid; the last name varies fastest.

    Args:
        values: Hyper-parameter -> its values. Names that are not in it are drawn.
        max_epochs: Epochs of each combination.
    """

    @lists_its_arguments
    def __init__(self, values: Mapping[str, Sequence[Value]], max_epochs: int = 10) -> None:
        require(
            bool(values) and all(len(v) for v in values.values()),
            "Grid", "values", "names, each with at least one value", values,
        )  # fmt: skip
        self._cells = [
            dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())
        ]
        super().__init__(len(self._cells), max_epochs)
        self._limit = len(self._cells)  # the same values would fail again

    def parameters(self, trial: int) -> Mapping[str, Value]:
        return self._cells[trial]
