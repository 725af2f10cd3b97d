"""Searchers: which trial trains how long. Each is a pure state machine."""

from __future__ import annotations

from sparkdl.tune.searchers.brackets import (
    AdaptiveAsha,
    Asha,
    AshaStopping,
    Hyperband,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from sparkdl.tune.searchers.searcher import WORST, Grid, RandomSearch, Searcher, Single

__all__ = [
    "WORST",
    "AdaptiveAsha",
    "Asha",
    "AshaStopping",
    "Grid",
    "Hyperband",
    "PopulationBasedTraining",
    "RandomSearch",
    "Searcher",
    "Single",
    "SuccessiveHalving",
]
