"""``Searcher``: the pure state machine that decides which trial trains how long."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from sparkdl.tune.segment import Segment
from sparkdl.tune.suggestions import Space, Value

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
