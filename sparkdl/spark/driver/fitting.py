"""One fit on the driver: start the run, train a stage, and again from a checkpoint if lost."""

from __future__ import annotations

import contextlib
import warnings
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sparkdl.config import FitConfig, LoopSettings
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.launch import interrupts
from sparkdl.learner import model_weights, optimizer_state
from sparkdl.learner.archive import encode_model, model_bytes, restore_state
from sparkdl.progress.monitor import FitMonitor
from sparkdl.run_state import RunState
from sparkdl.spark.columns.sources import Source
from sparkdl.spark.driver.choice import ChosenExchange
from sparkdl.spark.driver.cluster import check_barrier, default_parallelism, wait_for_slots
from sparkdl.spark.driver.metrics import prepare_metrics
from sparkdl.spark.driver.training import Run, StageLost, StageSummary, train_stage
from sparkdl.spark.executor.trainer import TrainTask
from sparkdl.weights import FloatArray, Layout


class Recipe(Protocol):
    """How the workers of a mode exchange their updates, as the driver sees it."""

    @property
    def window(self) -> int:
        """Batches per exchange."""

    @property
    def in_step(self) -> bool:
        """Whether all workers train in step, and so must run at the same time."""

    @property
    def barrier(self) -> bool:
        """Whether the stage is a barrier stage."""

    @property
    def compression(self) -> Any:
        """What the user asked for, as plain values."""

    @property
    def max_restarts(self) -> int:
        """How often a lost stage is begun again."""

    @property
    def rule_state(self) -> bytes:
        """What the rule keeps beside the model, as of the last epoch that the driver has."""

    def resume(self, rule_state: bytes) -> None:
        """Goes on from what an earlier run's rule kept."""

    def prepare(self, model: Any, num_workers: int) -> None:
        """Fits the recipe and the model to each other; ConfigError if they do not go together."""

    def reports_live(self, spark: Any) -> bool:
        """Whether the driver hears of the workers while they train."""

    def start(
        self, layout: Layout, center: FloatArray, num_workers: int, spark: Any, at_once: int
    ) -> contextlib.AbstractContextManager[Future[Any]]:
        """Brings the run up in the background; leaving the context ends all of it."""


@dataclass(frozen=True)
class FitPlan:
    """What one call of ``fit`` does; everything in it has been checked.

    Args:
        config: What the user asked of the model.
        recipe: How updates travel.
        model: The driver's model, trained in place.
        custom_objects: For its archive.
        source: The rows.
        num_workers: Workers of the run.
        at_once: How many of them can run at the same time (0: unknown).
        settings: Of the workers' loops, for the whole fit.
        checkpoints: Where to, or None.
    """

    config: FitConfig
    recipe: Recipe
    model: Any
    custom_objects: dict[str, Any]
    source: Source
    num_workers: int
    at_once: int
    settings: LoopSettings
    checkpoints: Checkpoints | None = None


def run_fit(plan: FitPlan, monitor: FitMonitor) -> StageSummary:
    """Trains to the plan's last epoch, or until a callback stops it.

    A stage whose workers were lost is begun again from the last whole epoch that the driver has,
    with the workers that are left if slots shrank.

    Raises:
        WorkerError: A worker raised, or workers were lost once too often.
        DataError: A worker found that the data do not fit.
        TransportError: The run's server died.
    """
    settings = plan.settings
    allowed = plan.recipe.max_restarts
    live = plan.recipe.reports_live(plan.source.spark)
    restarts = 0
    while True:
        last = settings.epochs
        if not live and (monitor.has_callbacks or plan.checkpoints is not None):
            last = min(last, settings.first_epoch + 1)  # what the driver does needs a stage's end
        try:
            summary = _train_stage(plan, replace(settings, epochs=last), monitor)
        except StageLost as lost:
            restarts += 1
            if restarts > allowed:
                raise lost.error from lost.error.__cause__
            plan = _with_workers_left(plan, lost, restarts)
            settings = replace(settings, first_epoch=lost.epoch)
            continue
        if monitor.stopped or last >= settings.epochs:
            return summary
        settings = replace(settings, first_epoch=last)


def _train_stage(plan: FitPlan, settings: LoopSettings, monitor: FitMonitor) -> StageSummary:
    """One stage, from the driver's model to the driver's model.

    Raises:
        StageLost: Its workers were lost; the model is as after ``StageLost.epoch`` epochs.
    """
    model, source = plan.model, plan.source
    layout = model_weights.model_layout(model)
    center = model_weights.read_model(model, layout)
    with plan.recipe.start(
        layout, center, plan.num_workers, source.spark, plan.at_once
    ) as starting:
        # The server's process comes up meanwhile.
        with interrupts.held():
            prepare_metrics(model, source)
            archive = encode_model(model, plan.custom_objects)
        run: Run = starting.result()

        def bring_weights() -> None:
            model_weights.write_model(model, layout, run.pull())
            state = run.optimizer_state()
            if state:
                optimizer_state.load_optimizer_state(model, state)

        monitor.watch(bring_weights)
        task = TrainTask(
            archive, source.spec, settings, run.strategy, plan.num_workers, plan.config.use_gpu,
            source.spec.role_column is not None,
        )  # fmt: skip

        def save_checkpoint(epoch: int) -> None:
            if plan.checkpoints is not None:
                if not monitor.has_callbacks:
                    bring_weights()
                state = RunState(epoch, rule=plan.recipe.rule_state)
                plan.checkpoints.save(model_bytes(model), state)

        monitor.begin()
        try:
            return train_stage(
                source, model, run, task, monitor, repartition=plan.config.repartition,
                barrier=plan.recipe.barrier, on_epoch=save_checkpoint,
            )  # fmt: skip
        except StageLost as lost:
            kept = run.checkpoint()
            if kept is None:  # the driver's model may be some epochs ahead of this stage's start
                lost.epoch = settings.first_epoch
                restore_state(model, archive)
            else:
                lost.epoch, weights, state = kept
                model_weights.write_model(model, layout, weights)
                optimizer_state.load_optimizer_state(model, state)
            raise


def _with_workers_left(plan: FitPlan, lost: StageLost, restarts: int) -> FitPlan:
    """The plan of the next try: as many workers as there is room for now."""
    slots = wait_for_slots(plan.source.spark, plan.num_workers)
    workers = plan.num_workers
    if slots is not None and plan.config.repartition:
        workers = max(1, min(workers, slots))
    warnings.warn(
        f"workers were lost ({lost.error.what}); training goes on from epoch {lost.epoch} with "
        f"{workers} of {plan.num_workers} workers, restart {restarts}",
        RuntimeWarning,
        stacklevel=4,
    )
    return replace(plan, num_workers=workers, at_once=min(plan.at_once, workers))


def count_workers(exchange: ChosenExchange, config: FitConfig, source: Source) -> tuple[int, int]:
    """Workers of a run, and how many of them can run at the same time (0: unknown).

    Args:
        exchange: Says whether all must run at once.
        config: How many workers the user asked for.
        source: The rows.

    Raises:
        ConfigError: ``num_workers`` is not the number of partitions, with repartition=False.
        ResourceError: There is no room for all where all must run at once.
    """
    if not config.repartition:
        count: int = source.frame.rdd.getNumPartitions()
        if config.num_workers not in (None, count):
            raise ConfigError(
                "num_workers and the data's partitions differ",
                expected=f"num_workers={count} (or None) with repartition=False",
                received=f"num_workers={config.num_workers}",
            )
    else:
        count = config.num_workers or default_parallelism(source.spark)
    if not config.with_server:
        check_barrier(source.spark, count)
        return count, count
    slots = wait_for_slots(source.spark, count, 15.0 if exchange.in_step else 0.0)
    if exchange.in_step and slots is not None and slots < count:
        raise ResourceError(
            f"mode {config.mode!r} needs all workers at the same time",
            expected=f"{count} task slots",
            received=f"{slots}",
            hint=f"num_workers={max(slots, 1)}, more executors, or mode='asynchronous'",
        )
    return count, 0 if slots is None else min(count, slots)
