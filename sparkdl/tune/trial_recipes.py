"""Recipes of a trial of ``tune.search``: the model of ``build``, or an estimator's with Params."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.learner.framework import seed_everything
from sparkdl.spark.ml.trained import FittedStage, Trained
from sparkdl.spark.ml.training import TrainingStage, archive_of
from sparkdl.tune.study import Study
from sparkdl.tune.suggestions import Trial

if TYPE_CHECKING:
    import keras

Build = Callable[[Trial], "keras.Model"]
StageParams = Callable[[Trial], Mapping[str, Any]]
"""Makes the Params of an estimator from a trial; their names are in camelCase."""
_SEARCHERS = ("epochs", "checkpointDir", "resume", "numWorkers", "seed", "verbose")
_OF_SEVERAL = {
    "mode", "frequency", "parameter_server_mode", "rule", "communicator", "compression",
    "network",
}  # fmt: skip
"""Settings of SparkModel that say how several workers exchange."""


@dataclass(frozen=True)
class TrialFit:
    """A model, the settings of its ``SparkModel``, and the arguments of its ``fit``."""

    model: keras.Model
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]


class BuildRecipe:
    """The model of the user's ``build``; a hyper-parameter ``batch_size`` is the batch size.

    Args:
        build: The user's function.
        seed: Seed of the search; with the trial's number that of its initial weights.
        settings: Settings of every ``SparkModel``.
        arguments: Arguments of every ``fit``; ``callbacks`` is a function that makes them.
    """

    def __init__(
        self, build: Build, seed: int, settings: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        self._build, self._seed = build, seed
        self._settings, self._arguments = settings, arguments

    def make(self, trial: Trial) -> TrialFit:
        """Calls the user's function, on the driver; the same for the same trial each time."""
        seed_everything(self._seed + trial.number)
        model = self._build(trial)
        settings, arguments = {**self._settings}, {**self._arguments}
        if trial.params.get("batch_size") is not None:
            settings["batch_size"] = trial.params["batch_size"]
        if arguments.get("callbacks") is not None:
            arguments["callbacks"] = arguments["callbacks"]()
        return TrialFit(model, settings, arguments)


class StageRecipe:
    """An estimator's model, settings and columns, with the trial's Params.

    Args:
        estimator: Estimator of :mod:`sparkdl.ml`; each trial has a copy.
        seed: Seed of the search; with the trial's number that of its initial weights.
        slots: Workers of a trial. With one, what the estimator says of exchanges has no effect.

    Raises:
        ConfigError: The estimator says what the searcher decides.
    """

    def __init__(
        self, estimator: TrainingStage, params: StageParams, schema: object, seed: int, slots: int
    ) -> None:
        _refuse([name for name in _SEARCHERS if estimator.isSet(name)])
        self._estimator, self._params, self._schema = estimator, params, schema
        self._seed, self._slots = seed, slots

    def make(self, trial: Trial) -> TrialFit:
        stage = self.stage(trial)
        seed_everything(self._seed + trial.number)
        plan = stage.plan_fit(self._schema)
        settings = {k: v for k, v in plan.settings.items() if k not in ("num_workers", "seed")}
        if self._slots == 1:
            settings = {k: v for k, v in settings.items() if k not in _OF_SEVERAL}
            settings["mode"] = "allreduce"  # which with one worker is plain Keras
        decided = ("epochs", "checkpoint_dir", "resume", "verbose")
        arguments = {k: v for k, v in plan.arguments.items() if k not in decided}
        return TrialFit(plan.model, settings, arguments)

    def stage(self, trial: Trial) -> TrainingStage:
        """The estimator with the trial's Params."""
        params = dict(self._params(trial))
        _refuse([name for name in params if name in _SEARCHERS])
        copied: TrainingStage = self._estimator.copy()
        return copied.setParams(**params)


Recipe = BuildRecipe | StageRecipe
"""Makes what a trial trains."""


class StageStudy(Study):
    """The result of a search over an estimator; :attr:`best_stage` is the best fitted stage."""

    recipe: StageRecipe

    @property
    def best_estimator(self) -> TrainingStage:
        """The estimator with the Params of :attr:`best_trial`; ``fit`` trains it anew."""
        record = self.best_trial
        return self.recipe.stage(Trial(record.number, 0, record.params))

    @property
    def best_stage(self) -> FittedStage:
        """The fitted stage of :attr:`best_trial`: it transforms DataFrames and goes into pipelines
        as if the estimator had trained it."""
        model = self.best_model
        made: FittedStage = self.best_estimator.make_stage(Trained.of(model, archive_of(model)))
        return made


def _refuse(names: list[str]) -> None:
    if names:
        raise ConfigError(
            f"the searcher decides {', '.join(names)}",
            expected="an estimator without",
            received=", ".join(names),
            hint="the searcher has max_epochs; tune.search has slots_per_trial, seed, verbose, "
            "checkpoint_dir and resume",
        )
