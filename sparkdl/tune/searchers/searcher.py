"""``Searcher``: the pure state machine that decides which trial trains how long, and by what."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkdl.errors import ConfigError
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require, require_whole
from sparkdl.tune.suggestions import Space, Value


@dataclass(frozen=True)
class Segment:
    """Epochs ``begin`` to ``end`` of a trial; pausing a trial is not to start its next segment.

    Args:
        trial: Number of the trial, from 0.
        begin: Epochs that the trial has done before.
        end: Epochs that it has done afterwards.
        parent: The trial whose checkpoint at ``begin`` the segment starts from; None for its own.
    """

    trial: int
    begin: int
    end: int
    parent: int | None = None


WORST = -math.inf
"""The score of a trial that failed, or whose metric is not a number."""


class Searcher(ABC):
    """Gives segments to train and is told their scores; the same calls give the same segments.

    It holds no model, no clock and no source of chance but its seed: a search that was cut off goes
    on by making its calls again.
    """

    @abstractmethod
    def ask(self) -> Segment | None:
        """The segment to train next; None: there is none until a score comes, or at all."""

    @abstractmethod
    def tell(self, trial: int, epochs: int, score: float) -> None:
        """The score of a trial after a number of epochs; larger is better."""

    @property
    @abstractmethod
    def max_epochs(self) -> int:
        """The epochs of a trial that is trained to the end."""

    @property
    def expected_epochs(self) -> int | None:
        """About how many epochs all trials will train together, for whoever waits; None where a
        searcher does not know."""
        return None

    def is_done(self, trial: int) -> bool:
        """Whether a trial that was told neither trains again nor is copied. False where a searcher
        does not know: then its checkpoint stays to the end of the search."""
        return False

    def copied_after(self, trial: int) -> frozenset[int]:
        """The epochs after which another trial takes over this one's checkpoint, and has not yet
        been told: the search keeps these checkpoints."""
        return frozenset()

    def parameters(self, trial: int) -> Mapping[str, Value]:
        """The values that this searcher sets itself; the others are drawn."""
        return {}

    def built(  # noqa: B027
        self, trial: int, spaces: Mapping[str, Space], params: Mapping[str, Value]
    ) -> None:
        """Hears what a trial's ``build`` asked for, before its first segment is trained."""


def worst_to_best(score: float) -> float:
    """A key to sort scores by, for which NaN is the worst."""
    return WORST if math.isnan(score) else score


@dataclass(frozen=True)
class Goal:
    """The metric that is searched for.

    Args:
        metric: Its name in the History.
        maximize: Whether larger is better.
    """

    metric: str
    maximize: bool

    def score(self, metrics: Mapping[str, float]) -> float:
        """The searcher's score: larger is better; that of NaN is the worst.

        Raises:
            ConfigError: The model has no such metric.
        """
        if self.metric not in metrics:
            raise ConfigError(
                f"the models have no metric {self.metric!r}",
                expected=f"metric= one of {', '.join(metrics)}", received=repr(self.metric),
                hint="names that begin with val_ need validation_data or validation_split",
            )  # fmt: skip
        value = float(metrics[self.metric])
        return WORST if math.isnan(value) else value if self.maximize else -value


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
    """One trial, trained to the end."""

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
        cells = itertools.product(*values.values())
        self._cells = [dict(zip(values, cell, strict=True)) for cell in cells]
        super().__init__(len(self._cells), max_epochs)
        self._limit = len(self._cells)  # the same values would fail again

    def parameters(self, trial: int) -> Mapping[str, Value]:
        return self._cells[trial]
