"""Hyper-parameter search: trials as chains of segments between checkpoints.

::

    from sparkdl import tune

    study = tune.search(build, df, searcher=tune.Asha(max_trials=64, max_epochs=27))
    study.best_params, study.best_model
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparkdl.tune.searchers import (
    AdaptiveAsha,
    Asha,
    AshaStopping,
    Grid,
    Hyperband,
    PopulationBasedTraining,
    RandomSearch,
    Searcher,
    Single,
)
from sparkdl.tune.searchers.searcher import Segment
from sparkdl.tune.study import Study
from sparkdl.tune.suggestions import OptunaSampler, Sampler, Trial, from_keras_tuner

if TYPE_CHECKING:
    from sparkdl.tune.spark_search import search as search

__all__ = [
    "AdaptiveAsha",
    "Asha",
    "AshaStopping",
    "Grid",
    "Hyperband",
    "OptunaSampler",
    "PopulationBasedTraining",
    "RandomSearch",
    "Sampler",
    "Searcher",
    "Segment",
    "Single",
    "Study",
    "Trial",
    "from_keras_tuner",
    "search",
]


def __getattr__(name: str) -> Any:
    if name != "search":
        raise AttributeError(f"module 'sparkdl.tune' has no attribute {name!r}")
    # the one part that needs Spark
    return importlib.import_module("sparkdl.tune.spark_search").search
