"""One fit on the driver: starts a run, trains a stage, and again where the stage was lost."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sparkdl.collective.choice import optimizer_config
from sparkdl.collective.rules import Sliced
from sparkdl.config import AUTO_WINDOW, FitConfig, LoopSettings, without_network
from sparkdl.errors import RowsAheadError, SparkDLError, TransportError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.launch import interrupts
from sparkdl.learner.archives.archive import ModelArchive, encode_model, restore_state
from sparkdl.learner.callback_sink import (
    CallbackSink,
    acts_on_metric,
    may_act,
    require_directions,
    warn_of_waiting_in_vain,
)
from sparkdl.learner.description import describe_model
from sparkdl.learner.framework import debug_limits
from sparkdl.learner.prediction.ensemble import build_ensemble
from sparkdl.learner.state import metric_state
from sparkdl.learner.state.carried_state import names_in_buffer
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.learner.state.optimizer_state import (
    DriverSlots,
    batch_counter,
    innermost_optimizer,
    take_averages,
)
from sparkdl.process.user_warnings import warn_user
from sparkdl.progress.bar import ProgressBar
from sparkdl.progress.events import Json, RunDescription, Sink, TrainingBegan, TrainingEnded
from sparkdl.progress.monitor import FitMonitor
from sparkdl.ps.choice import ServerExchange
from sparkdl.rules.rule import Rule
from sparkdl.spark.executor.trainer import TrainTask
from sparkdl.spark.fit.arguments import FitArguments, verbosity
from sparkdl.spark.fit.choice import ChosenExchange
from sparkdl.spark.fit.fit_warnings import (
    described,
    guessing_loss,
    normalizes,
    warn_of_damping,
    warn_of_mixed_validation,
    warn_of_no_learning,
    warn_of_server_load,
)
from sparkdl.spark.fit.plan import (
    FitPlan,
    StageFailure,
    count_workers,
    loop_settings,
    prepare_model,
)
from sparkdl.spark.fit.trained_model import (
    TrainedModel,
    check_tables,
    prepare_metrics,
    rows_on_servers,
    tables_folder,
    tables_of_run,
)
from sparkdl.spark.fit.training import FitStage, StageLost, StageSummary, spreading, was_interrupted
from sparkdl.spark.fit.training_run import Run, ServerRun, reports_live, start_all_reduce
from sparkdl.spark.forms.sources import Source
from sparkdl.spark.runs.capacity import count_slots, slot_pool, wait_for_slots
from sparkdl.spark.runs.resources import resource_profile
from sparkdl.tracking.event_files import Timeline
from sparkdl.tracking.notebook import NotebookCurves, curves_take_the_bars_place
from sparkdl.tracking.page.dashboard import process_dashboard
from sparkdl.tracking.profile import Facts, profile_of
from sparkdl.tracking.sinks import GivenSink, GuardedSink, sinks_of
from sparkdl.training.phases import too_many_workers
from sparkdl.worker import auto_window

_LONG_FIT_S = 10.0
"""Seconds of training from which on ``fit`` says that one process would be faster; of a shorter fit
its summary and its profile do."""
DASHBOARD = "spark.sparkdl.dashboard"
"""Spark's configuration key: ``true`` for the page."""


@dataclass(frozen=True)
class Fitted:
    """The outcome of a call of ``fit``.

    Args:
        summary: The work of the last stage; None where nothing was left to train.
        facts: The same for the profile.
        ensemble: The members, where workers trained models of their own.
    """

    history: Any
    epochs: int = 0
    summary: StageSummary | None = None
    facts: Facts | None = None
    ensemble: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class FitCall:
    """One call of ``fit`` but for its data: how to train and who is told, all checked.

    Args:
        timeline: A file to write what every rank did when; None for none.
        began_at: The time of the call, in seconds since 1970.
    """

    callbacks: list[Any]
    profile: bool
    sinks: Sequence[GivenSink] | GivenSink | None
    timeline: str | None
    began_at: float
    arguments: FitArguments

    def train(
        self,
        config: FitConfig,
        exchange: ChosenExchange,
        trained: TrainedModel,
        custom_objects: dict[str, Any],
        source: Source,
        epochs_trained: int,
        interrupted: Callable[[Fitted], object],
    ) -> Fitted:
        """Trains the model of ``trained`` on the rows of ``source``.

        Args:
            trained: Its model, which changes in place.
            epochs_trained: Epochs of earlier calls.
            interrupted: Is told of a fit that the user ended, of which the model keeps what was
                trained.

        Raises:
            WorkerError, DataError, TransportError: See :func:`run_fit`.
        """
        most_epochs, most_steps = debug_limits()
        arguments, callbacks = self.arguments.within(most_epochs), self.callbacks
        profile = resource_profile(config.resources, source.spark)
        num_workers, at_once = count_workers(config, exchange, source, profile)
        prepare_model(trained.model, config, exchange, num_workers)
        checkpoints = Checkpoints.at(arguments.checkpoint_dir)
        check_tables(trained.model, config, exchange, checkpoints, callbacks)
        first_epoch = arguments.initial_epoch
        if arguments.resume and checkpoints is not None:
            first_epoch = trained.restore(checkpoints) or first_epoch
        settings = loop_settings(
            config, exchange, arguments, first_epoch=first_epoch, epochs_trained=epochs_trained,
            most_steps=most_steps, has_callbacks=bool(callbacks),
        )  # fmt: skip
        if first_epoch >= settings.epochs:
            return Fitted(_nothing_to_do(trained.model, callbacks, first_epoch, settings.epochs))
        plan = FitPlan(
            config, exchange, trained, custom_objects, source, num_workers, at_once, settings,
            checkpoints, profile,
        )  # fmt: skip
        self._check_callbacks(plan)
        plan, keras_callbacks, monitor = self._followed(plan, arguments)
        try:
            summary = run_fit(plan, monitor)
        except BaseException as error:
            monitor.fail(error)
            if was_interrupted(error):
                interrupted(Fitted(keras_callbacks.history, monitor.epochs_done - first_epoch))
            raise
        return self._end(plan, keras_callbacks, monitor, summary)

    def _check_callbacks(self, plan: FitPlan) -> None:
        """Refuses callbacks that look for what the fit has not, or warns; builds metrics for it."""
        model, source = plan.trained.model, plan.source
        if any(map(acts_on_metric, self.callbacks)):
            prepare_metrics(model, source, plan.settings.batch_size)
            require_directions(self.callbacks, model)
        warn_of_waiting_in_vain(self.callbacks, validates=source.validates is not None)

    def _followed(
        self, plan: FitPlan, arguments: FitArguments
    ) -> tuple[FitPlan, CallbackSink, FitMonitor]:
        """The plan with what callbacks and sinks ask of the workers, and who is told of the fit."""
        trained, settings, waits = plan.trained, plan.settings, self._waits(plan)
        keras_callbacks = CallbackSink(
            trained.model, self.callbacks, epochs=settings.epochs,
            verbose=verbosity(arguments.verbose), waits=waits,
        )  # fmt: skip
        trackers = open_sinks(
            self.sinks, self.timeline, lambda: trained.model, plan.source.spark, self.began_at
        )
        monitor = FitMonitor(
            keras_callbacks, [progress_sink(arguments.verbose), *trackers],
            partial(metric_state.metric_results, trained.model),
            epochs=settings.epochs, first_epoch=settings.first_epoch,
            run=describe_run(plan, arguments), validates=plan.source.validates,
        )  # fmt: skip
        keep_spans = any(sink.wants_spans for sink in trackers)
        settings = replace(settings, wait_for_driver=waits, keep_spans=keep_spans)
        return replace(plan, settings=settings), keras_callbacks, monitor

    def _waits(self, plan: FitPlan) -> bool:
        """Whether the workers wait at an epoch's end until callbacks have run.

        Where they train in step they do for any callback. Elsewhere they do for one that may write
        to the model, or wants the weights that its logs are of: if all workers run at the same
        time, for one that waited for a worker without a slot would wait for ever.
        """
        exchange = plan.exchange
        if exchange.in_step:
            return bool(self.callbacks) or rows_on_servers(plan.trained.model, exchange)
        acts = any(map(may_act, self.callbacks))
        return acts and not exchange.independent and max(plan.at_once, 1) >= plan.num_workers

    def _end(
        self,
        plan: FitPlan,
        keras_callbacks: CallbackSink,
        monitor: FitMonitor,
        summary: StageSummary,
    ) -> Fitted:
        """Saves the last epoch, makes an ensemble of members, and says that the fit has ended."""
        trained, ensemble = plan.trained, list[Any]()
        if plan.checkpoints is not None and not monitor.stopped_inside:
            trained.save(plan.checkpoints, monitor.epochs_done)
        if summary.members:
            members = list(summary.members.values())
            trained.model, ensemble = build_ensemble(trained.model, members)
            summary = replace(summary, members={})
        epochs = monitor.epochs_done - plan.settings.first_epoch
        facts = facts_of(plan, summary, epochs)
        if self.profile:
            print(profile_of(facts), flush=True)
        monitor.end()
        return Fitted(keras_callbacks.history, epochs, summary, facts, ensemble)


def _nothing_to_do(model: object, callbacks: list[Any], epochs_done: int, epochs: int) -> Any:
    """An empty History, with a warning, for a fit whose epochs have all been trained."""
    warn_user(
        f"fit has nothing left to train: {epochs_done} epochs are done, and epochs={epochs} is "
        "the epoch to stop at when fit goes on (resume, initial_epoch); "
        f"epochs={epochs_done + 1} trains one more",
        UserWarning,
    )
    keras_callbacks = CallbackSink(model, callbacks, epochs=epochs, verbose=0)
    keras_callbacks.handle(TrainingBegan(epochs, epochs))
    keras_callbacks.handle(TrainingEnded(epochs))
    return keras_callbacks.history


def run_fit(plan: FitPlan, monitor: FitMonitor) -> StageSummary:
    """Trains to the plan's last epoch, or until a callback stops it.

    A stage whose workers were lost is begun again from the last whole epoch that the driver has,
    with the workers that are left if slots shrank; one whose server was lost from the last
    checkpoint, if there are any.

    Raises:
        WorkerError: A worker raised, or workers were lost once too often.
        DataError: A worker found that the data do not fit.
        TransportError: The run's server died.
    """
    validates = plan.source.spec.role_column is not None
    if validates and not (plan.exchange.in_step or plan.exchange.independent):
        warn_of_mixed_validation(plan.num_workers, plan.at_once)
    plan.source.warn_of_chance(repartition=plan.config.repartition)
    with _slots(plan):
        summary = _run_fit(plan, monitor)
    take_averages(plan.trained.model)
    outrun = too_many_workers(summary.trained_usage, _LONG_FIT_S)
    if outrun is not None:
        warn_user(outrun)
    if isinstance(plan.exchange, ServerExchange) and not plan.exchange.in_step:
        _warn(plan, plan.exchange.rule, summary, monitor)
    return summary


def _warn(plan: FitPlan, rule: Rule, summary: StageSummary, monitor: FitMonitor) -> None:
    """Says what workers that did not wait for each other would have learned better from."""
    at_once = min(plan.at_once or plan.num_workers, plan.num_workers)
    warn_of_server_load(summary.usage, window_of(plan, summary), at_once)
    guessing = guessing_loss(plan.trained.model, summary.label_mean)
    if warn_of_no_learning(monitor.losses, guessing, at_once) or not rule.damps:
        return
    steps = summary.epochs * summary.rows // plan.num_workers // plan.settings.batch_size
    centers = {} if normalizes(plan.trained.model) else summary.off_center
    furthest = max(centers, key=lambda name: centers[name], default="")
    columns = plan.source.spec.features[furthest].columns if furthest else ()
    warn_of_damping(
        summary.counted, at_once, steps, centers.get(furthest, 0.0), described(furthest, columns)
    )


def _slots(plan: FitPlan) -> AbstractContextManager[None]:
    """Slots of servers on executors, and of workers that all run at once; others take turns."""
    capacity = count_slots(plan.source.spark, plan.profile)
    servers = plan.config.server_slots
    if capacity is None or not (plan.exchange.all_at_once or servers):
        return nullcontext()
    workers = plan.num_workers if plan.exchange.all_at_once else 1
    name = f"fit of model {plan.trained.model.name!r}"
    limit_s = plan.config.limits.start_timeout_s
    return slot_pool(plan.source.spark).take(workers + servers, capacity, name, limit_s)


def _run_fit(plan: FitPlan, monitor: FitMonitor) -> StageSummary:
    settings = plan.settings
    live = reports_live(plan.config, plan.source.spark)
    restarts = 0
    plan.trained.keeps_rate = monitor.has_callbacks
    plan.trained.constrains = not plan.exchange.joins_gradients
    while True:
        last = settings.epochs
        if not live and (monitor.has_callbacks or plan.checkpoints is not None):
            last = min(last, settings.first_epoch + 1)  # what the driver does needs a stage's end
        try:
            summary = _train_stage(plan, replace(settings, epochs=last), monitor, restarts)
        except _Again as lost:
            restarts += 1
            plan = _with_workers_left(plan, lost, restarts)
            # A callback may have stopped at the epoch that ended last: nothing more is trained.
            until = lost.epoch if monitor.stopped else settings.epochs
            settings = replace(settings, first_epoch=lost.epoch, epochs=until)
            continue
        if monitor.stopped or last >= settings.epochs:
            return summary
        settings = replace(settings, first_epoch=last)


class _Again(Exception):
    """After ``error`` the model is as it was after ``epoch`` epochs, and training goes on there."""

    def __init__(self, error: SparkDLError, epoch: int) -> None:
        super().__init__(str(error))
        self.error, self.epoch = error, epoch


def _train_stage(
    plan: FitPlan, settings: LoopSettings, monitor: FitMonitor, restarts: int
) -> StageSummary:
    trained, source = plan.trained, plan.source
    trained.slots, trained.has_optimizer = _slots_of(plan), False
    rule_state = trained.state_for_rule()
    monitor.begin()  # the workers get the model with the learning rate of their first epoch
    with interrupts.CleanStack() as stack:
        # The server's process comes up while the model is written.
        starting = stack.begin(_start_run(plan, rule_state))
        spread = stack.begin(spreading(
            source, plan.num_workers, in_order=not settings.shuffle,
            repartition=plan.config.repartition,
        ))  # fmt: skip
        with interrupts.held():
            prepare_metrics(trained.model, source, settings.batch_size)
            with nullcontext() if trained.slots is None else trained.slots.left_out():
                archive = encode_model(trained.model, plan.custom_objects, for_worker=True)
        # Workers begin with the values that a server has.
        known = names_in_buffer(trained.model) if isinstance(plan.exchange, ServerExchange) else ()
        sent = replace(archive, values={n: v for n, v in archive.values.items() if n not in known})
        run: Run = starting.result()

        waits = settings.wait_for_driver  # rows of the next round would be ahead of the weights
        monitor.watch(lambda: trained.take(run.state()), waits=waits)
        task = TrainTask(
            sent, source.spec, replace(settings, at_once=plan.at_once), run.strategy,
            plan.num_workers, plan.config.use_gpu, source.dealt(plan.num_workers),
            source.shared.key if source.shared else None,
        )  # fmt: skip
        try:
            return FitStage(plan, run, task, monitor).train(spread)
        except (TransportError, RowsAheadError, StageLost) as raised:
            error = raised.error if isinstance(raised, StageLost) else raised
            of_server = error is raised
            ended = isinstance(run, ServerRun) and run.server_lost
            if of_server and not (ended or isinstance(error, RowsAheadError)):
                raise
            kept = None if of_server else run.kept()
            saved = None
            if of_server and plan.checkpoints is not None:
                saved = trained.restore(plan.checkpoints)
            recovery = plan.recovery.decide(StageFailure(
                settings.first_epoch, restarts, of_server, None if kept is None else kept.epoch,
                saved,
            ))  # fmt: skip
            if recovery is None:
                raise
            if recovery.state == "begun":  # the driver's model may be some epochs ahead of it
                _restore(trained, archive, rule_state)
            if kept is not None:
                trained.take(kept)
                trained.slots_kept = kept.rule
            if of_server or kept is not None:
                monitor.loaded_again(recovery.epoch)
            if kept is not None:
                monitor.end_epochs(run.progress(monitor.epochs_done), kept.epoch)
            if not recovery.again:
                raise error from error.__cause__
            raise _Again(error, recovery.epoch) from raised


def _slots_of(plan: FitPlan) -> DriverSlots | None:
    """The slots of the model's optimizer, if the workers take its steps in slices."""
    rule, model = plan.exchange.rule, plan.trained.model
    if not isinstance(rule, Sliced):
        return None
    bound = rule.bind(plan.num_workers, optimizer_config(model.optimizer))
    return DriverSlots.of(model, bound.optimizer, bound.keras_slots())


def _restore(trained: TrainedModel, archive: ModelArchive, rule_state: bytes) -> None:
    if trained.slots is None:
        restore_state(trained.model, archive)
        trained.rule_state = rule_state
        return
    with trained.slots.left_out():
        restore_state(trained.model, archive)
        steps = int(batch_counter(innermost_optimizer(trained.model)).numpy())
    trained.slots.take(rule_state, steps)
    trained.slots_kept = rule_state


def _start_run(
    plan: FitPlan, rule_state: bytes
) -> AbstractContextManager[Future[ServerRun] | Future[Run]]:
    """Brings a run up in the background, from the driver's present model."""
    model = plan.trained.model
    layout, folder = model_layout(model), tables_folder(model, plan.checkpoints)
    if isinstance(plan.exchange, ServerExchange):
        tables = tables_of_run(model, folder, rule_state, plan.config.on_nan)
        return ServerRun.start(plan, plan.exchange, layout, read_model(model, layout), tables)
    rule = plan.exchange.rule.bind(plan.num_workers, optimizer_config(model.optimizer))
    return start_all_reduce(plan, plan.exchange, rule, layout, rule_state, folder)


def _with_workers_left(plan: FitPlan, lost: _Again, restarts: int) -> FitPlan:
    """The plan of the next try: as many workers as there is room for now."""
    workers, who = plan.num_workers, "a parameter server was"
    if isinstance(lost.error, RowsAheadError):
        who = "all workers were"
    if not plan.config.with_server:
        who = "workers were"
        slots = wait_for_slots(plan.source.spark, plan.num_workers, profile=plan.profile)
        workers = plan.recovery.workers(workers, slots)
    warn_user(
        f"{who} lost ({lost.error.what}); training goes on from epoch {lost.epoch} with "
        f"{workers} of {plan.num_workers} workers, restart {restarts}"
    )
    return replace(plan, num_workers=workers, at_once=min(plan.at_once, workers))


def open_sinks(
    sinks: Sequence[GivenSink] | GivenSink | None,
    timeline: str | None,
    model: Callable[[], object],
    spark: Any,
    began_at: float | None = None,
) -> list[GuardedSink]:
    """The sinks of a fit: the user's, the timeline's, and those that stand for every fit.

    With ``spark.sparkdl.dashboard=true`` the first fit of the process opens the page. The timeline
    begins at ``began_at``, in seconds since 1970.

    Raises:
        ConfigError: Something is no sink.
    """
    if str(spark.conf.get(DASHBOARD, "false")).lower() == "true":
        process_dashboard()
    given = [] if sinks is None else list(sinks) if isinstance(sinks, Sequence) else [sinks]
    if timeline is not None:
        given.append(Timeline(timeline, began_at=began_at))
    return sinks_of(given, model)


def progress_sink(verbose: str | int) -> Sink:
    """The view of a fit for its caller: curves in a notebook, else a bar or lines."""
    if curves_take_the_bars_place(verbose):
        return GuardedSink(NotebookCurves())
    return ProgressBar(verbosity(verbose))


def describe_run(plan: FitPlan, arguments: FitArguments) -> RunDescription:
    """Which fit it is, with what it was asked to do; nothing of where servers listen."""
    model, told = plan.trained.model, without_network(plan.config.to_dict())
    asked: dict[str, Json] = json.loads(json.dumps(told, default=str))
    asked |= {
        "epochs": arguments.epochs,
        "batch_size": plan.settings.batch_size,
        "num_workers": plan.num_workers,
        "validation_split": arguments.validation_split,
        "shuffle": arguments.shuffle,
    }
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return RunDescription(run_id, model.name, plan.num_workers, asked | describe_model(model))


def facts_of(plan: FitPlan, summary: StageSummary, epochs: int) -> Facts:
    """The facts for a profile of a fit's last stage."""
    return Facts(
        summary.usage, summary.rank_rows, min(epochs, summary.epochs), plan.settings.batch_size,
        window_of(plan, summary), plan.exchange.in_step, summary.transports, plan.config.mode,
    )  # fmt: skip


def window_of(plan: FitPlan, summary: StageSummary) -> int:
    """Batches between two exchanges; of the automatic window those of a worker with mean rows."""
    if plan.settings.window != AUTO_WINDOW:
        return plan.settings.window
    workers = len(summary.usage)
    steps = summary.rows // max(workers, 1) // plan.settings.batch_size
    return auto_window(steps, plan.settings.at_once or workers)
