"""``FitPlan``: all that one call of ``fit`` does, checked before a job starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.collective.choice import AllReduceExchange, optimizer_config
from sparkdl.collective.rules.exchange_rule import ExchangeRule
from sparkdl.config import FitConfig, LoopSettings
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.learner.checks.compiling import adopt_optimizer, require_trainable
from sparkdl.learner.prediction.ensemble import require_cloneable
from sparkdl.learner.state.carried_state import require_no_states
from sparkdl.learner.state.model_weights import require_joined_steps
from sparkdl.learner.state.synchronized_norms import require_synchronized
from sparkdl.spark.fit.arguments import FitArguments
from sparkdl.spark.fit.choice import ChosenExchange
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.spark.forms.sources import Source
from sparkdl.spark.runs.capacity import (
    check_barrier,
    count_partitions,
    default_parallelism,
    slots_to_come,
    wait_for_slots,
)

if TYPE_CHECKING:
    import keras
    from pyspark.resource import ResourceProfile

_SEED_STEP = 7919
"""Between the seeds of the row order of two epochs, so that a second fit has orders of its own."""


@dataclass(frozen=True)
class FitPlan:
    """The plan of one call of ``fit``.

    Args:
        at_once: How many workers can run at the same time (0: unknown).
        settings: Settings of the workers' loops, for the whole fit.
    """

    config: FitConfig
    exchange: ChosenExchange
    trained: TrainedModel
    custom_objects: dict[str, Any]
    source: Source
    num_workers: int
    at_once: int
    settings: LoopSettings
    checkpoints: Checkpoints | None = None
    profile: ResourceProfile | None = None

    @property
    def recovery(self) -> RecoveryPolicy:
        """The policy for lost workers and servers."""
        return RecoveryPolicy(self.config.restarts, self.config.repartition)


@dataclass(frozen=True)
class StageFailure:
    """The remains of a stage of training that lost its workers or its server.

    Args:
        began: Epochs that were done when the stage began.
        restarts: How often the fit began again before.
        of_server: Whether the weights were lost, too; else some of them may be with the driver.
        kept: Epochs of the state that workers left with the driver in this stage; None: none.
        saved: Epochs of the newest checkpoint; None: the fit writes none.
    """

    began: int
    restarts: int = 0
    of_server: bool = False
    kept: int | None = None
    saved: int | None = None


@dataclass(frozen=True)
class Recovery:
    """A decision after a failure.

    Args:
        state: What the model becomes: as it was when the stage began, as workers left it with the
            driver, or as in the newest checkpoint.
        epoch: Epochs that are done in it.
        again: Whether training goes on from there; else the error is raised.
    """

    state: Literal["begun", "kept", "saved"]
    epoch: int
    again: bool


@dataclass(frozen=True)
class RecoveryPolicy:
    """Decides what a fit does after a failure, and does nothing itself.

    Args:
        most: Restarts of a fit at most.
        shrinks: Whether fewer workers may go on, where task slots were lost.
    """

    most: int
    shrinks: bool

    def decide(self, failure: StageFailure) -> Recovery | None:
        """The decision; None where no state can be had back, so that the error is raised."""
        again = failure.restarts < self.most
        if failure.of_server and failure.saved is None:
            return None
        if not failure.of_server and failure.kept is not None:
            return Recovery("kept", failure.kept, again)
        if failure.saved is not None and failure.saved > failure.began:
            return Recovery("saved", failure.saved, again)
        return Recovery("begun", failure.began, again)

    def workers(self, workers: int, slots: int | None) -> int:
        """How many workers go on where there are ``slots`` (None: any number)."""
        return workers if slots is None or not self.shrinks else max(1, min(workers, slots))


def loop_settings(
    config: FitConfig,
    exchange: ChosenExchange,
    arguments: FitArguments,
    *,
    first_epoch: int,
    epochs_trained: int,
    most_steps: int | None,
    has_callbacks: bool,
) -> LoopSettings:
    """The settings of each worker's loop, without ``wait_for_driver`` and ``keep_spans``.

    Args:
        epochs_trained: Epochs that earlier fits trained.
        most_steps: Batches in an epoch of each worker, at most; None for any number.
        has_callbacks: Whether the driver has callbacks, which want the weights of each epoch.
    """
    wanted_by_driver = has_callbacks or arguments.checkpoint_dir is not None
    return LoopSettings(
        epochs=arguments.last_epoch(first_epoch), first_epoch=first_epoch,
        batch_size=config.batch_size if arguments.batch_size is None else arguments.batch_size,
        window=exchange.window, shuffle=arguments.shuffle,
        seed=config.seed + _SEED_STEP * epochs_trained,
        keep_state=not config.with_server or wanted_by_driver or exchange.joins_gradients,
        follow_schedule=not exchange.in_step, check_data=arguments.check_data,
        steps_per_epoch=arguments.steps_per_epoch, most_steps=most_steps,
        validation_steps=arguments.validation_steps, class_weight=arguments.class_weight,
        memory_budget_bytes=config.limits.memory_budget_mb << 20,
    )  # fmt: skip


def prepare_model(
    model: keras.Model, config: FitConfig, exchange: ChosenExchange, num_workers: int
) -> None:
    """Checks that rule and model go together; gives the model the optimizer that the rule wants.

    Raises:
        ConfigError: The rule cannot work with that many workers, with the model's optimizer, or
            with a layer that is synchronized.
        ModelError: No ensemble can be made of the model, several workers cannot train it, or it
            has nothing to train.
    """
    require_trainable(model)
    if num_workers > 1:
        require_no_states(model)
        rule = exchange.rule
        sends = rule.exchanges if isinstance(rule, ExchangeRule) else rule.payload
        if sends in ("gradient", "optimizer"):  # others exchange changes or weights
            require_joined_steps(model, exchange.joins_gradients, rule.name)
    way = f"mode={config.mode!r}, rule={exchange.rule.name!r}, on_nan={config.on_nan!r}"
    exact = exchange.joins_gradients and exchange.rule.name in ("bsp", "mean")
    followed = exact and exchange.window == 1 and config.on_nan != "skip"
    require_synchronized(model, num_workers, way, followed=followed)
    if isinstance(exchange, AllReduceExchange):
        exchange.rule.bind(num_workers, optimizer_config(model.optimizer))
        return
    if exchange.independent:
        require_cloneable(model)
    adopt_optimizer(model, exchange.rule.local_optimizer())


def count_workers(
    config: FitConfig,
    exchange: ChosenExchange,
    source: Source,
    profile: ResourceProfile | None = None,
) -> tuple[int, int]:
    """Workers of a run, and how many of them can run at the same time (0: unknown).

    Raises:
        ConfigError: ``num_workers`` is not the number of partitions, with repartition=False.
        ResourceError: There is no room for all where all must run at once.
    """
    beside = config.server_slots
    if not config.repartition and not source.files:
        count = count_partitions(source.frame)
        if config.num_workers not in (None, count):
            raise ConfigError(
                "num_workers and the data's partitions differ",
                expected=f"num_workers={count} (or None) with repartition=False",
                received=f"num_workers={config.num_workers}",
            )
    else:
        count = config.num_workers or default_parallelism(source.spark, profile) - beside
        if count < 1:
            raise ResourceError(
                "there is no task slot for a worker beside the servers'",
                expected=f"at least {beside + 1} task slots for servers='executors'",
                received=f"{beside + count}",
                hint="more executors, fewer servers, or servers='driver'",
            )
    if not config.with_server:
        check_barrier(source.spark, count, profile=profile)
        return count, count
    if not exchange.all_at_once:
        slots = slots_to_come(source.spark, count + beside, profile)
        return count, 0 if slots is None else min(count, max(slots - beside, 0))
    slots = wait_for_slots(source.spark, count + beside, 15.0, profile)
    slots = None if slots is None else slots - beside
    if slots is not None and slots < count:
        who = f"mode {config.mode!r}" if exchange.in_step else f"rule {exchange.rule.name!r}"
        other = "mode='asynchronous'" if exchange.in_step else "rule='downpour'"
        raise ResourceError(
            f"{who} needs all workers at the same time", expected=f"{count} task slots",
            received=f"{slots}" + (f", beside {beside} for servers" if beside else ""),
            hint=f"num_workers={max(slots, 1)}, more executors, or {other}",
        )  # fmt: skip
    return count, 0 if slots is None else min(count, slots)
