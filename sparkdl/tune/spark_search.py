"""``tune.search``: trials that ``SparkModel.fit`` trains, of a user's ``build`` or an estimator."""

from __future__ import annotations

import functools
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError, closest
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.launch import interrupts
from sparkdl.learner.callback_sink import at_least_one
from sparkdl.learner.framework import seed_everything
from sparkdl.learner.prediction.ensemble import vote
from sparkdl.learner.state.metric_state import larger_is_better
from sparkdl.process.user_warnings import warn_user
from sparkdl.progress.events import EpochEnded, Event, Json, SearchBegan, SearchEnded
from sparkdl.settings import values
from sparkdl.settings.values import require_int, require_name, require_seconds, shown
from sparkdl.spark.fit.arguments import verbosity
from sparkdl.spark.fit.fitting import open_sinks
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.spark.forms.opening import settled
from sparkdl.spark.forms.shipped import removes_tables
from sparkdl.spark.ml.trained import FittedStage, Trained
from sparkdl.spark.ml.training import TrainingStage, archive_of
from sparkdl.spark.runs import capacity
from sparkdl.spark.session import running
from sparkdl.spark.shared_data import SharedData
from sparkdl.spark.spark_model import SparkModel
from sparkdl.tracking.notebook import NotebookTrials, curves_take_the_bars_place
from sparkdl.tracking.sinks import GivenSink, GuardedSink, without_standing
from sparkdl.tune.journal import Journal, TrialRecord
from sparkdl.tune.runner import OnEpoch, SearchRun, SegmentTraining
from sparkdl.tune.searchers import AdaptiveAsha, Searcher
from sparkdl.tune.searchers import __all__ as searchers
from sparkdl.tune.searchers.searcher import Goal, Segment
from sparkdl.tune.study import Study
from sparkdl.tune.suggestions import Drawn, Sampler, Trial, Value

if TYPE_CHECKING:
    import keras
    from pyspark.sql import SparkSession


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


class FitTrainer:
    """Trains segments by ``SparkModel.fit`` from checkpoint to checkpoint."""

    def __init__(
        self, spark: SparkSession, recipe: Recipe, data: object, folder: str, slots: int, seed: int,
        best_epochs: bool,
    ) -> None:  # fmt: skip
        self._recipe, self._data, self._folder = recipe, SharedData(data), folder
        self._slots, self._seed, self._best_epochs = slots, seed, best_epochs
        self.spark = spark
        self._tag = f"sparkdl-tune-{uuid.uuid4().hex[:12]}"

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        """Builds the model; see :class:`sparkdl.tune.runner.TrialTrainer`."""
        made = self._recipe.make(trial)
        self._set_out(made, segment)
        arguments = {**made.arguments}
        if self._best_epochs:  # each epoch's end needs a checkpoint of its own
            arguments["callbacks"] = at_least_one(arguments.get("callbacks"))
        settings = {"num_workers": self._slots, "seed": self._seed, **made.settings}
        spark_model = SparkModel(made.model, **settings)
        alone = settings["num_workers"] == 1 and spark_model.repartition
        data = self._data if alone else self._data.settled()

        def hear(event: Event) -> None:
            if isinstance(event, EpochEnded):
                on_epoch(event.epoch, event.metrics)

        def train() -> dict[str, float]:
            capacity.tag_jobs(self.spark, self._tag)
            with without_standing():
                history = spark_model.fit(
                    data, epochs=segment.end, verbose=0, resume=True, sinks=[hear],
                    checkpoint_dir=self._of(segment.trial), **arguments,
                )  # fmt: skip
            return {name: float(told[-1]) for name, told in history.history.items() if told}

        return train

    def cancel(self) -> None:
        """Ends the jobs of all trials."""
        capacity.cancel_tagged(self.spark, self._tag)

    def close(self) -> None:
        """Frees the rows that the trials shared."""
        self._data.close()

    def delete(self, trial: int) -> None:
        """Deletes a trial's checkpoints."""
        Checkpoints(self._of(trial)).clear()

    def keep(self, trial: int, epochs: Collection[int]) -> None:
        Checkpoints(self._of(trial)).keep(epochs)

    def load(self, record: TrialRecord) -> keras.Model:
        """The model that a trial stands for."""
        trial = Trial(record.number, self._seed, record.params)
        trained = TrainedModel(self._recipe.make(trial).model)
        checkpoints = Checkpoints(self._of(record.number))
        checkpoint = checkpoints.after(record.model_epoch)
        if checkpoint is not None:
            trained.load(checkpoint, checkpoints.folder)
            return trained.model
        found = trained.restore(checkpoints)
        warn_user(
            f"the checkpoint of trial {record.number} after {record.model_epoch} epochs is not "
            f"there or not whole; its model is that after {found} epochs"
        )
        return trained.model

    def _of(self, number: int) -> str:
        return f"{self._folder.rstrip('/')}/trial-{number:05d}"

    def _set_out(self, made: TrialFit, segment: Segment) -> None:
        """Leaves the checkpoint in the trial's folder that the segment goes on from."""
        own = Checkpoints(self._of(segment.trial))
        # Its metrics were lost with the driver, or those of its epochs: it is trained again.
        lost = own.newest() >= segment.end or (self._best_epochs and own.newest() > segment.begin)
        if lost and not own.rewind(segment.begin):
            own.clear()
        if segment.parent is None or own.restore() is not None:
            return
        parent = Checkpoints(self._of(segment.parent))
        checkpoint = parent.after(segment.begin) or parent.restore()
        if checkpoint is not None:
            copy = TrainedModel(made.model)
            copy.load(checkpoint, parent.folder, keep_rate=True)
            copy.save(own, segment.begin)


def _maximizes(metric: str, recipe: Recipe, seed: int, caught: tuple[type[Exception], ...]) -> bool:
    """Whether larger is better, as the metric of a model that is made only for that says."""
    if metric in ("loss", "val_loss"):
        return False
    received = "no such metric with a direction in the model that build makes"
    try:
        found = larger_is_better(recipe.make(Trial(0, seed)).model, metric)
    except caught as error:  # a trial may fail
        found, received = None, f"{type(error).__name__} from build: {str(error)[:300]}"
    if found is None:
        raise ConfigError(
            f"whether a larger or a smaller {metric!r} is better is not known",
            expected="a loss, or a metric of Keras that knows its direction; else mode=",
            received=received, hint="mode='max' or mode='min'",
        )  # fmt: skip
    return found


@interrupts.heard()
@removes_tables()
def search(
    build: Build | TrainingStage,
    data: object,
    validation_data: object = None,
    metric: str = "val_loss",
    mode: str = "auto",
    searcher: Searcher | None = None,
    max_concurrent: int | str = "auto",
    slots_per_trial: int = 1,
    seed: int = 0,
    checkpoint_dir: str | None = None,
    resume: bool = False,
    timeout_s: float | None = None,
    verbose: str | int = "auto",
    settings: Mapping[str, Any] | None = None,
    sampler: Sampler | None = None,
    sinks: Sequence[GivenSink] | GivenSink | None = None,
    params: StageParams | None = None,
    keep_best: int | None = None,
    keep_epoch: str = "last",
    catch: type[Exception] | Sequence[type[Exception]] = (Exception,),
    **fit_arguments: object,
) -> Study:
    """Finds the hyper-parameters with the best metric.

    ::

        def build(trial):
            units = trial.suggest_int('units', 16, 256, log=True)
            rate = trial.suggest_float('rate', 1e-4, 1e-1, log=True)
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(units, 'relu'),
                                      keras.layers.Dense(10, 'softmax')])
            model.compile(keras.optimizers.Adam(rate), 'sparse_categorical_crossentropy',
                          metrics=['accuracy'])
            return model

        study = tune.search(build, df, metric='val_accuracy', validation_split=0.2,
                            searcher=tune.Asha(max_trials=64, max_epochs=27))
        study.best_params, study.best_model

    A trial whose ``build`` or training fails, or whose metric is NaN, is scored worst and replaced
    by another. A hyper-parameter named ``batch_size`` is the trial's batch size.

    Args:
        build: Makes a compiled and built model from a :class:`~sparkdl.tune.Trial`; runs on the
            driver, before every segment of the trial, and must make the same model each time.
            Or an estimator of :mod:`sparkdl.ml`, beside ``params``.
        data: What :meth:`SparkModel.fit` takes.
        validation_data: Likewise; or pass ``validation_split``.
        metric: A name in the History, such as ``'val_accuracy'``.
        mode: ``'min'``, ``'max'``, or ``'auto'`` as the metric of the model says (an error asks
            where it does not).
        searcher: Searcher of :mod:`sparkdl.tune`; None for ``AdaptiveAsha()``.
        max_concurrent: Trials side by side; ``'auto'`` for as many as there are slots.
        slots_per_trial: Workers of a trial; each is a task slot.
        seed: Seed of the hyper-parameters, the models' initial weights and the row order.
        checkpoint_dir: A path or URI for the trials' checkpoints and the journal; None for a
            temporary folder, which ``study.close()`` deletes.
        resume: Go on with the search that ``checkpoint_dir`` holds; no segment is trained twice.
        timeout_s: Ends the search after this number of seconds; its best trial so far counts.
        verbose: 0 prints nothing; 1 a line whenever a trial was compared; ``'auto'`` as 1, in a
            notebook with matplotlib the trials' curves.
        settings: More arguments of :class:`SparkModel`, such as ``{'mode': 'synchronous'}``; the
            default is ``'allreduce'``, which with one worker is plain Keras.
        sampler: Gives new trials their hyper-parameters: :class:`~sparkdl.tune.OptunaSampler`;
            None for values by chance.
        sinks: Who is told of the search and its trials (:mod:`sparkdl.progress.events`), as in
            :meth:`SparkModel.fit`; so are the page and MLflow where they are told of every fit.
        params: For an estimator: a function of the trial that gives its Params, such as ``lambda
            trial: {'batchSize': trial.suggest_categorical('batch', [32, 64])}``. The columns, the
            split and all else are the estimator's.
        keep_best: The best trials that keep their checkpoints in ``checkpoint_dir``; a trial
            that is not among them and will not train again has none. None for all.
        keep_epoch: Which of its epochs a trial stands for in ``study``. ``'last'``: that after
            which it was last compared. ``'best'``: that with the best metric, whose checkpoint is
            kept beside the newest one; the driver then looks at each epoch's end, as with
            ``callbacks``. Searchers compare trials by their last epochs in either case.
        catch: What ``build`` or a trial's training may raise (a worker's exception is a
            ``WorkerError``) for the trial to count as failed; anything else ends the search.
        **fit_arguments: More arguments of :meth:`SparkModel.fit`, such as ``features``, ``label``,
            ``callbacks`` (made anew for each segment by a function without arguments).

    Returns:
        The trials, best first, and the models of the best; with an estimator also
        ``best_stage``, the best fitted stage, and ``best_estimator``.

    Raises:
        ConfigError: An argument that cannot be used.
        SparkDLError: The first trials failed; the error of the first.
    """
    require_name("mode", mode, ("auto", "min", "max"))
    require_name("keep_epoch", keep_epoch, ("last", "best"))
    seed = require_int("seed", seed, 0)
    if checkpoint_dir is not None:
        checkpoint_dir = values.require_path("checkpoint_dir", checkpoint_dir)
    resume = values.require_flag("resume", resume)
    slots_per_trial = require_int("slots_per_trial", slots_per_trial, 1)
    if keep_best is not None:
        keep_best = require_int("keep_best", keep_best, 1)
    caught = tuple(catch) if isinstance(catch, Sequence) else (catch,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in caught):
        raise ConfigError(
            "catch names what a trial may raise",
            expected="classes of exceptions, such as (MemoryError, ValueError)",
            received=repr(catch),
        )
    _check_kinds(metric, searcher, timeout_s, settings)
    searcher = searcher if searcher is not None else AdaptiveAsha()
    if resume and checkpoint_dir is None:
        raise ConfigError(
            "there is nothing to resume", expected="checkpoint_dir= of the search that goes on",
            received="checkpoint_dir=None",
        )  # fmt: skip
    refused = {"epochs", "checkpoint_dir", "resume", "initial_epoch"} & {*fit_arguments}
    if refused:
        raise ConfigError(
            f"tune.search does not take {', '.join(sorted(refused))}",
            expected="what the searcher does not decide", received=", ".join(sorted(refused)),
            hint="the searcher has max_epochs",
        )  # fmt: skip
    callbacks = fit_arguments.get("callbacks")
    if callbacks is not None and not callable(callbacks):
        raise ConfigError(
            "trials that train side by side cannot share callbacks",
            expected="callbacks=a function without arguments that makes them",
            received=repr(callbacks),
            hint="callbacks=lambda: [keras.callbacks.EarlyStopping(patience=3)]",
        )
    spark = running.session_of(data)
    arguments = {"validation_data": settled(validation_data), **fit_arguments}
    recipe = _recipe(build, params, data, seed, slots_per_trial, settings, arguments)
    maximize = mode == "max" or (mode == "auto" and _maximizes(metric, recipe, seed, caught))
    goal = Goal(metric, maximize)
    temporary = None if checkpoint_dir else TemporaryFolder()
    folder = temporary.path if temporary is not None else str(checkpoint_dir)
    told: dict[str, Value] = {"metric": metric, "maximize": maximize, "seed": seed}
    told |= {"searcher": type(searcher).__name__, "keep_epoch": keep_epoch}
    expected_epochs = searcher.expected_epochs  # before it has given its first segment
    journal = Journal.at(folder, told, resume=resume)
    best_epochs = keep_epoch == "best"
    trainer = FitTrainer(spark, recipe, data, folder, slots_per_trial, seed, best_epochs)
    kind = StageStudy if isinstance(recipe, StageRecipe) else Study
    study = kind(journal, goal, trainer.load, vote, temporary=temporary)
    if isinstance(study, StageStudy) and isinstance(recipe, StageRecipe):
        study.recipe = recipe
    trackers = open_sinks(sinks, None, lambda: study.best_model, spark)
    show = None
    if curves_take_the_bars_place(verbose):
        trackers.append(GuardedSink(NotebookTrials()))
    elif verbosity(verbose):
        show = functools.partial(_print_line, study)

    def tell(event: Event) -> None:
        for tracker in trackers:
            tracker.handle(event)

    try:
        began = _described(
            goal, searcher, sampler, seed=seed, slots_per_trial=slots_per_trial,
            expected_epochs=expected_epochs, timeout_s=timeout_s,
        )  # fmt: skip
        tell(began)
        SearchRun(
            searcher, trainer, journal, goal, seed=seed, timeout_s=timeout_s,
            max_concurrent=_at_once(max_concurrent, slots_per_trial, trainer.spark),
            on_score=show or (lambda trial, score: None), sampler=sampler or Drawn(),
        tell_sinks=tell,
            keep_best=keep_best, best_epochs=best_epochs, catch=caught,
        ).run()  # fmt: skip
        tell(_ended(study))
    except BaseException as error:
        tell(_ended(study, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        study.close()
        raise
    finally:
        trainer.close()
    return study


def _check_kinds(metric: object, searcher: object, timeout_s: object, settings: object) -> None:
    """Refuses arguments that are not of their kind, before there is a folder."""
    if not isinstance(metric, str) or not metric:
        raise ConfigError(
            "metric must name what trials are compared by",
            expected="a name in the History, such as 'val_loss' or 'val_accuracy'",
            received=shown(metric),
        )
    if searcher is not None and not isinstance(searcher, Searcher):
        named = searcher if isinstance(searcher, type) else closest(str(searcher), searchers)
        called = named.__name__ if isinstance(named, type) else named or "Asha"
        raise ConfigError(
            "searcher must be an object that decides which trial trains how long",
            expected="a searcher of sparkdl.tune, such as tune.Asha(max_trials=64, max_epochs=27)",
            received=shown(searcher), hint=f"searcher=tune.{called}(...)",
        )  # fmt: skip
    if timeout_s is not None:
        require_seconds("timeout_s", timeout_s)
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(
            "settings must be arguments of SparkModel",
            expected="a dict: name -> value, such as {'mode': 'synchronous'}",
            received=shown(settings),
        )


def _recipe(
    build: Build | TrainingStage, params: StageParams | None, data: Any, seed: int, slots: int,
    settings: Mapping[str, Any] | None, arguments: Mapping[str, Any],
) -> Recipe:  # fmt: skip
    if isinstance(build, TrainingStage):
        given = [name for name, value in arguments.items() if value is not None]
        given += ["settings"] * (settings is not None) + ["params=None"] * (params is None)
        if params is None or given or not hasattr(type(data), "schema"):
            raise ConfigError(
                "this does not go with an estimator",
                expected="tune.search(estimator, DataFrame, params=function of the trial, ...); "
                "all else of the fits as Params of the estimator",
                received=", ".join(given) or f"data: {type(data).__name__}",
                hint="params=lambda trial: {'learningRate': trial.suggest_float('rate', 1e-4, "
                "1e-1, log=True)}",
            )
        return StageRecipe(build, params, data.schema, seed, slots)
    if params is not None or not callable(build):
        raise ConfigError(
            "tune.search trains what build makes, or an estimator with params",
            expected="a function of a trial that returns a compiled model; params= only with an "
            "estimator of sparkdl.ml",
            received=f"{type(build).__name__}" + " and params" * (params is not None),
        )
    return BuildRecipe(build, seed, {"mode": "allreduce", **(settings or {})}, arguments)


def _described(
    goal: Goal, searcher: Searcher, sampler: Sampler | None, **asked: float | None
) -> SearchBegan:
    parameters: dict[str, Json] = {
        "searcher": type(searcher).__name__,
        "max_epochs": searcher.max_epochs,
        "sampler": type(sampler).__name__ if sampler is not None else "random",
        **{name: value for name, value in asked.items() if value is not None},
    }
    search_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return SearchBegan(search_id, goal.metric, goal.maximize, parameters)


def _ended(study: Study, error: str = "") -> SearchEnded:
    if not study.ranked():
        return SearchEnded(None, None, error)
    return SearchEnded(study.best_trial.number, study.best_value, error)


def _at_once(asked: int | str, slots_per_trial: int, spark: object) -> int:
    if asked != "auto":
        return require_int("max_concurrent", asked, 1)
    slots = capacity.count_slots(spark) or capacity.default_parallelism(spark)
    return max(1, slots // slots_per_trial)


def _print_line(study: Study, trial: int, score: float) -> None:
    record = next(r for r in study.records if r.number == trial)
    name = study.goal.metric
    params = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in record.params.items()}
    asked = ", ".join(f"{k}={v}" for k, v in params.items())
    print(
        f"trial {trial}: epoch {record.epochs}, {name} {record.metrics[record.epochs][name]:.4f} "
        f"(best {study.best_value:.4f}, trial {study.best_trial.number}) {asked}",
        flush=True,
    )
