"""Elephas' ``HyperParamModel``: a search over functions with Hyperas' ``{{...}}`` in them."""

from __future__ import annotations

import math
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

import sparkdl
from sparkdl.compat.elephas.templates import Template
from sparkdl.errors import ConfigError, ModelError
from sparkdl.launch import interrupts
from sparkdl.learner.checks.compiling import model_from_json
from sparkdl.learner.framework import seed_everything
from sparkdl.learner.prediction.ensemble import vote
from sparkdl.process import payload
from sparkdl.settings.values import require_int, require_name
from sparkdl.spark.runs import capacity
from sparkdl.spark.runs.function_stage import check_callable
from sparkdl.tune.journal import Journal
from sparkdl.tune.runner import OnEpoch, SegmentTraining, run_search
from sparkdl.tune.searchers import RandomSearch
from sparkdl.tune.searchers.searcher import Goal, Segment
from sparkdl.tune.suggestions import Trial

TrialResult = dict[str, Any]
"""A trial: ``tid``, ``params``, and ``result``, which the model function returned."""
_EXAMPLE = (
    "{'loss': -accuracy, 'status': 'ok', 'model': model.to_json(), "
    "'weights': pickle.dumps(model.get_weights())}"
)


class HyperParamModel:
    """Random search; each trial is a task of Spark that calls ``model(*data())``.

    ::

        def model(x_train, y_train, x_test, y_test):
            network = keras.Sequential([keras.Input((784,)),
                                        keras.layers.Dense({{choice([64, 256])}}, 'relu'),
                                        keras.layers.Dropout({{uniform(0, 1)}}), ...])
            network.compile(...)
            network.fit(x_train, y_train, batch_size={{choice([64, 128])}})
            loss, accuracy = network.evaluate(x_test, y_test)
            return {'loss': -accuracy, 'status': 'ok', 'model': network.to_json(),
                    'weights': pickle.dumps(network.get_weights())}

        best = HyperParamModel(sc).minimize(model=model, data=data, max_evals=5)

    ``'model'`` may also be the Keras model itself, without ``'weights'``. Hyperas and Hyperopt
    need not be installed. What the functions name outside of themselves travels with them.

    Args:
        sc: The SparkContext.
        num_workers: Tasks side by side, each with ``max_evals`` trials, as in Elephas.
        seed: Seed of the hyper-parameters, the initial weights and the order of the rows.
    """

    def __init__(self, sc: object, num_workers: int = 4, *, seed: int = 0) -> None:
        self.spark_context = sc
        self.num_workers = require_int("num_workers", num_workers, 1)
        self.seed = seed

    def minimize(self, model: Callable[..., Any], data: Callable[[], Any], max_evals: int) -> Any:
        """The Keras model of the trial with the smallest ``'loss'``.

        Args:
            model: Builds, trains and evaluates a model; see the class.
            data: Returns the arguments of ``model``; called in each trial.
            max_evals: Trials for each of ``num_workers``.

        Raises:
            ConfigError: A hyper-parameter that cannot be drawn; a result without a loss.
            WorkerError: The first trials failed; the error of the first.
        """
        return self.best_models(1, model, data, max_evals)[0]

    def best_models(
        self, nb_models: int, model: Callable[..., Any], data: Callable[[], Any], max_evals: int
    ) -> list[Any]:
        """The Keras models of the trials with the smallest losses, best first."""
        (trials,) = self.compute_trials(model, data, max_evals)
        ranked = sorted(trials, key=lambda trial: trial["result"]["loss"])
        return [_model_of(trial["result"]) for trial in ranked[:nb_models]]

    def best_ensemble(
        self,
        nb_ensemble_models: int,
        model: Callable[..., Any],
        data: Callable[[], Any],
        max_evals: int,
        voting: str = "hard",
        weights: Sequence[float] | None = None,
    ) -> Any:
        """One Keras model of the best: ``'soft'`` predicts the mean of their predictions,
        ``'hard'`` the share of them that prefers each class.

        Raises:
            ConfigError: Another voting; weights, which sparkdl's ensembles do not have.
        """
        require_name("voting", voting, ("hard", "soft"))
        if weights is not None:
            raise ConfigError(
                "all members of an ensemble count the same", expected="weights=None",
                received=repr(weights), hint="best_models(...) returns the members",
            )  # fmt: skip
        return vote(self.best_models(nb_ensemble_models, model, data, max_evals), voting)

    @interrupts.heard()
    def compute_trials(
        self, model: Callable[..., Any], data: Callable[[], Any], max_evals: int
    ) -> list[list[TrialResult]]:
        """All trials that ended well, in one list, as Elephas has a list per worker."""
        count = self.num_workers * require_int("max_evals", max_evals, 1)
        check_callable(data)
        sc = self.spark_context
        spark = sc if hasattr(sc, "createDataFrame") else SparkSession.builder.getOrCreate()
        trainer = _FunctionTrainer(spark, Template(model), data, self.seed)
        folder = tempfile.mkdtemp(prefix="sparkdl-hyperparam-")
        journal = Journal.at(folder, {"seed": self.seed}, resume=False)
        try:
            run_search(
                RandomSearch(count, max_epochs=1), trainer,
                journal, Goal("loss", False), seed=self.seed, timeout_s=None,
                on_score=lambda trial, score: None,
                max_concurrent=min(self.num_workers, capacity.count_slots(spark) or 1),
            )  # fmt: skip
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if not trainer.trials:
            errors = sorted({record.error or record.state for record in journal.trials.values()})
            raise ConfigError(
                "no trial has ended with a loss", expected=_EXAMPLE,
                received=f"{len(journal.trials)} trials: {'; '.join(errors)}",
            )  # fmt: skip
        return [[trainer.trials[number] for number in sorted(trainer.trials)]]


class _FunctionTrainer:
    """Calls the user's function in a task; see :class:`sparkdl.tune.runner.TrialTrainer`."""

    def __init__(
        self, spark: object, template: Template, data: Callable[[], Any], seed: int
    ) -> None:
        self._spark, self._template, self._data, self._seed = spark, template, data, seed
        self._tag = f"sparkdl-hyperparam-{uuid.uuid4().hex[:12]}"
        self.trials: dict[int, TrialResult] = {}

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        call = payload.dump((self._template.fill(trial), self._data))

        def train() -> Mapping[str, float]:
            capacity.tag_jobs(self._spark, self._tag)
            given = call, self._seed + trial.number
            (content,) = sparkdl.run(
                _call, given, num_workers=1, communicator="builtin", spark=self._spark
            )
            result = _checked(payload.load(content))
            if not math.isnan(result["loss"]):
                self.trials[trial.number] = {
                    "tid": trial.number, "params": dict(trial.params), "result": result,
                }  # fmt: skip
            return {"loss": result["loss"]}

        return train

    def cancel(self) -> None:
        capacity.cancel_tagged(self._spark, self._tag)

    def delete(self, trial: int) -> None:
        """There is nothing to delete: these trials write no checkpoints."""

    def keep(self, trial: int, epochs: Collection[int]) -> None:
        """Nor is there anything to keep."""


def _call(call: bytes, seed: int) -> bytes:
    """Runs a trial on an executor; the same seed trains the same model."""
    seed_everything(seed)
    function, data = payload.load(call)
    arguments = data()
    result = function(*(arguments if isinstance(arguments, tuple) else (arguments,)))
    if isinstance(result, dict) and hasattr(result.get("model"), "get_weights"):
        network = result["model"]
        result = {**result, "model": network.to_json(), "weights": network.get_weights()}
    return payload.dump(result)


def _checked(result: Any) -> TrialResult:
    """The result with its loss as a number; NaN for a trial that says that it failed."""
    try:
        number = float(result["loss"]) if result.get("status", "ok") == "ok" else math.nan
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "the model function returns what its trial is compared by", expected=_EXAMPLE,
            received=repr(result)[:200],
        ) from error  # fmt: skip
    return {**result, "loss": number}


def _model_of(result: TrialResult) -> Any:
    """The trained model of a trial, compiled if the trial says with what."""
    text, weights = result.get("model"), result.get("weights")
    if not isinstance(text, str) or weights is None:
        raise ModelError(
            "the trial's result has no model", expected=_EXAMPLE, received=", ".join(sorted(result))
        )
    model = model_from_json(text, {})
    model.set_weights(payload.load(weights) if isinstance(weights, bytes) else weights)
    return model
