"""``Goal``: the metric that a search compares trials by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparkdl.errors import ConfigError
from sparkdl.tune.searchers.searcher import WORST


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
                expected=f"metric= one of {', '.join(metrics)}",
                received=repr(self.metric),
                hint="names that begin with val_ need validation_data or validation_split",
            )
        value = float(metrics[self.metric])
        return WORST if math.isnan(value) else value if self.maximize else -value
