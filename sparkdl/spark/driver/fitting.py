"""One fit on the driver: starts a run, trains a stage, and again where the stage was lost."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from sparkdl.collective.choice import optimizer_config
from sparkdl.config import LoopSettings
from sparkdl.launch import interrupts
from sparkdl.learner.archive import encode_model, restore_state
from sparkdl.learner.guessing import guessing_loss
from sparkdl.learner.model_weights import model_layout, read_model
from sparkdl.learner.normalizing import normalizes
from sparkdl.progress.monitor import FitMonitor
from sparkdl.ps.choice import ServerExchange
from sparkdl.rules.rule import Rule
from sparkdl.spark.columns.sources import warn_of_chance
from sparkdl.spark.driver.allreduce_run import reports_live, start_all_reduce
from sparkdl.spark.driver.capacity import count_slots, wait_for_slots
from sparkdl.spark.driver.fit_warnings import (
    described,
    warn_of_damping,
    warn_of_mixed_validation,
    warn_of_no_learning,
    warn_of_server_load,
)
from sparkdl.spark.driver.metrics import prepare_metrics
from sparkdl.spark.driver.plan import FitPlan
from sparkdl.spark.driver.server_run import ServerRun
from sparkdl.spark.driver.slots import slot_pool
from sparkdl.spark.driver.telling import window_of
from sparkdl.spark.driver.training import StageLost, StageSummary, train_stage
from sparkdl.spark.driver.training_run import Run
from sparkdl.spark.executor.trainer import TrainTask
from sparkdl.user_warnings import warn_user


def run_fit(plan: FitPlan, monitor: FitMonitor) -> StageSummary:
    """Trains to the plan's last epoch, or until a callback stops it.

    A stage whose workers were lost is begun again from the last whole epoch that the driver has,
    with the workers that are left if slots shrank.

    Raises:
        WorkerError: A worker raised, or workers were lost once too often.
        DataError: A worker found that the data do not fit.
        TransportError: The run's server died.
    """
    validates = plan.source.spec.role_column is not None
    if validates and not (plan.exchange.in_step or plan.exchange.independent):
        warn_of_mixed_validation(plan.num_workers, plan.at_once)
    warn_of_chance(plan.source, repartition=plan.config.repartition)
    with _slots(plan):
        summary = _run_fit(plan, monitor)
    model = plan.trained.model  # with use_ema: the averages become the weights, once, as in Keras
    model.optimizer.finalize_variable_values(model.trainable_variables)
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
    """The slots of workers that must all run at the same time; others take turns."""
    capacity = count_slots(plan.source.spark, plan.profile)
    if capacity is None or not plan.exchange.all_at_once:
        return nullcontext()
    name = f"fit of model {plan.trained.model.name!r}"
    limit_s = plan.config.start_timeout_s
    return slot_pool(plan.source.spark).take(plan.num_workers, capacity, name, limit_s)


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
            summary = _train_stage(plan, replace(settings, epochs=last), monitor)
        except StageLost as lost:
            restarts += 1
            if restarts > plan.config.restarts:
                raise lost.error from lost.error.__cause__
            plan = _with_workers_left(plan, lost, restarts)
            # A callback may have stopped at the epoch that ended last: nothing more is trained.
            until = lost.epoch if monitor.stopped else settings.epochs
            settings = replace(settings, first_epoch=lost.epoch, epochs=until)
            continue
        if monitor.stopped or last >= settings.epochs:
            return summary
        settings = replace(settings, first_epoch=last)


def _train_stage(plan: FitPlan, settings: LoopSettings, monitor: FitMonitor) -> StageSummary:
    """One stage, from the driver's model to the driver's model.

    Raises:
        StageLost: Its workers were lost; the model is as after ``StageLost.epoch`` epochs.
    """
    trained, source = plan.trained, plan.source
    rule_state, trained.has_optimizer = trained.rule_state, False
    monitor.begin()  # the workers get the model with the learning rate of their first epoch
    with interrupts.CleanStack() as stack:
        # The server's process comes up while the model is written.
        starting = stack.begin(_start_run(plan))
        with interrupts.held():
            prepare_metrics(trained.model, source, settings.batch_size)
            archive = encode_model(trained.model, plan.custom_objects)
        run: Run = starting.result()

        monitor.watch(lambda: trained.take(run.state()))
        task = TrainTask(
            archive, source.spec, replace(settings, at_once=plan.at_once), run.strategy,
            plan.num_workers, plan.config.use_gpu, source.spec.role_column is not None,
            source.dealt(plan.num_workers), source.shared.key if source.shared else None,
        )  # fmt: skip

        def save_checkpoint(epoch: int) -> None:
            if plan.checkpoints is not None:
                if not monitor.has_callbacks:
                    trained.take(run.state())
                trained.save(plan.checkpoints, epoch, monitor.rate_between_epochs)

        try:
            return train_stage(
                source, trained, run, task, monitor, repartition=plan.config.repartition,
                barrier=not plan.config.with_server, on_epoch=save_checkpoint, profile=plan.profile,
            )  # fmt: skip
        except StageLost as lost:
            kept = run.kept()
            if kept is None:  # the driver's model may be some epochs ahead of this stage's start
                lost.epoch = settings.first_epoch
                restore_state(trained.model, archive)
                trained.rule_state = rule_state
            else:
                lost.epoch = kept.epoch
                trained.take(kept)
                monitor.loaded_again(kept.epoch)
                monitor.end_epochs(run.progress(monitor.epochs_done), kept.epoch)
            raise


def _start_run(
    plan: FitPlan,
) -> AbstractContextManager[Future[ServerRun] | Future[Run]]:
    """Brings a run up in the background, from the driver's present model."""
    spark, model = plan.source.spark, plan.trained.model
    layout = model_layout(model)
    if isinstance(plan.exchange, ServerExchange):
        center = read_model(model, layout)
        return ServerRun.start(
            plan.config, plan.exchange, layout, center, plan.num_workers, plan.at_once, spark,
            waits=plan.settings.wait_for_driver,
        )  # fmt: skip
    rule = plan.exchange.rule.bind(plan.num_workers, optimizer_config(model.optimizer))
    return start_all_reduce(
        plan.config, plan.exchange, rule, layout, plan.trained.rule_state, plan.num_workers, spark
    )


def _with_workers_left(plan: FitPlan, lost: StageLost, restarts: int) -> FitPlan:
    """The plan of the next try: as many workers as there is room for now."""
    slots = wait_for_slots(plan.source.spark, plan.num_workers, profile=plan.profile)
    workers = plan.num_workers
    if slots is not None and plan.config.repartition:
        workers = max(1, min(workers, slots))
    warn_user(
        f"workers were lost ({lost.error.what}); training goes on from epoch {lost.epoch} with "
        f"{workers} of {plan.num_workers} workers, restart {restarts}"
    )
    return replace(plan, num_workers=workers, at_once=min(plan.at_once, workers))
