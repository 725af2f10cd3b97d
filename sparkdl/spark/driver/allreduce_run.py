"""The driver's end of ``mode='allreduce'``: a coordinator, or the results of the stage alone.

On classic Spark a coordinator in the driver takes the workers' metrics, keeps one worker's state of
the last epoch, and tells the workers to stop. On Spark Connect the workers cannot reach the client:
they return their metrics when the stage ends.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.collective.choice import AllReduceExchange
from sparkdl.collective.rules import ExchangeRule, Mean
from sparkdl.collective.strategy import AllReduceStrategy
from sparkdl.config import FitConfig
from sparkdl.coordinator.host import CoordinatorHost
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import TransportError
from sparkdl.progress.commands import Command
from sparkdl.progress.run_progress import EpochProgress, RunProgress, progress_of
from sparkdl.run_state import RunState
from sparkdl.spark.driver.cluster import is_connect, listening_address
from sparkdl.spark.driver.trained_model import TrainedModel
from sparkdl.spark.driver.training import Run
from sparkdl.spark.executor.barrier_strategy import BarrierStrategy
from sparkdl.transport.listeners import ListenOptions
from sparkdl.weights import FloatArray, Layout

CONNECT_TIMEOUT_S = 20.0
"""Ranks that met through the coordinator connect to each other within seconds, or not at all."""


def reports_live(config: FitConfig, spark: Any) -> bool:
    """Whether the driver hears of the workers while they train."""
    return config.with_server or not is_connect(spark)


@contextlib.contextmanager
def start_all_reduce(
    config: FitConfig,
    exchange: AllReduceExchange,
    rule: ExchangeRule,
    layout: Layout,
    trained: TrainedModel,
    num_workers: int,
    spark: Any,
) -> Iterator[Future[Run]]:
    """Starts the coordinator, if workers can reach it; leaving the context ends it.

    Args:
        config: Ports, addresses and time limits.
        exchange: What the workers exchange, and when.
        rule: That of ``exchange``, bound to the number of workers and the model's optimizer.
        layout: Of the model's variables.
        trained: The driver's model, with what the rule kept in an earlier run.
        num_workers: Workers of the run.
        spark: The session.
    """
    live = reports_live(config, spark)
    gradients = AllReduceStrategy(
        secrets.token_bytes(32), layout, _communicator(config), _limits(config, live),
        exchange.wire, None if _is_plain_mean(exchange) else rule, exchange.window,
        trained.rule_state,
    )  # fmt: skip
    run: Future[Run] = Future()
    if not live:
        run.set_result(SilentRun(BarrierStrategy(gradients, None), trained))
        yield run
        return
    bind, advertised = listening_address(spark, config)
    settings = Settings(
        num_workers,
        lease_s=config.worker_timeout_s,
        start_timeout_s=config.start_timeout_s,
        max_state_bytes=16 * layout.size_bytes + (64 << 20),
    )
    listen = ListenOptions("socket", config.port, bind, advertised, web=False)
    with CoordinatorHost(settings, listen) as host:
        strategy = BarrierStrategy(gradients, host.endpoint)
        run.set_result(AllReduceRun(host, strategy, num_workers, trained))
        yield run


def _is_plain_mean(exchange: AllReduceExchange) -> bool:
    """The mean at every step is faster without a rule: inside the compiled step."""
    return type(exchange.rule) is Mean and exchange.window == 1


def _communicator(config: FitConfig) -> str:
    """Horovod's operations are TensorFlow's: other backends do not import it for nothing."""
    import keras

    if config.communicator == "auto" and keras.backend.backend() != "tensorflow":
        return "builtin"
    return config.communicator


def _limits(config: FitConfig, live: bool) -> dict[str, float]:
    """How long the communicator waits: for ranks that evaluate or compile, and to connect.

    Ranks that met through the coordinator connect at the same moment; without it one may still
    import its framework.
    """
    start_s = config.start_timeout_s
    return {
        "timeout_s": max(config.worker_timeout_s, start_s),
        "connect_timeout_s": min(CONNECT_TIMEOUT_S, start_s) if live else start_s,
    }


class AllReduceRun:
    """Follows the workers through a coordinator; see :class:`Run`."""

    def __init__(
        self,
        host: CoordinatorHost,
        strategy: BarrierStrategy,
        num_workers: int,
        trained: TrainedModel,
    ) -> None:
        self._driver, self._num_workers, self._trained = host.driver, num_workers, trained
        self.strategy = strategy

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """What the workers report."""
        return progress_of(self._driver.status(since_epoch), self._num_workers, in_step=True)

    def command(self, command: Command) -> None:
        """Passes a command on to the workers."""
        self._driver.control(
            stop=command.stop, learning_rate=command.learning_rate, release=command.release
        )

    def checkpoint(self) -> tuple[int, FloatArray, bytes] | None:
        """Epochs done, weights and optimizer state that rank 0 left last; None if it has not."""
        with contextlib.suppress(TransportError):
            kept = self._driver.kept()
            if kept:
                state = RunState.from_bytes(kept)
                self._trained.rule_state = state.rule
                return state.epoch, state.weights, state.optimizer
        return None

    def pull(self) -> FloatArray:
        """The weights after the last epoch."""
        kept = self.checkpoint()
        if kept is None:
            raise TransportError(
                "no worker has left its weights yet", expected="an epoch that has ended"
            )
        return kept[1]

    def optimizer_state(self) -> bytes:
        """The optimizer state after the last epoch."""
        kept = self.checkpoint()
        return b"" if kept is None else kept[2]

    def result(self, rows: list[Any]) -> FloatArray:
        """The trained weights, which one rank returned; keeps the rule's state."""
        self._trained.rule_state = joined(rows, "rule")
        return joined_weights(rows)


@dataclass
class SilentRun:
    """Hears of the workers when their stage has ended, since they cannot reach the driver.

    Args:
        strategy: How the workers' updates travel.
        trained: The driver's model.
        rows: What the stage returned.
    """

    strategy: BarrierStrategy
    trained: TrainedModel
    rows: list[Any] = field(default_factory=list)

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """Nothing while the stage runs; after it, all epochs."""
        told = [json.loads(r.text) for r in self.rows if r.kind == "epochs"]
        done = [json.loads(r.text) for r in self.rows if r.kind == "done"]
        seconds = max((float(d["seconds"]) for d in done), default=0.0)
        numbers = sorted({int(n) for worker in told for n in worker})
        epochs: dict[int, EpochProgress] = {}
        for number in numbers:
            parts = [worker[str(number)] for worker in told if str(number) in worker]
            epochs[number] = EpochProgress(
                missing=0,
                batches=sum(p["batches"] for p in parts),
                rows=sum(p["rows"] for p in parts),
                metrics=_sum_states(p["metrics"] for p in parts),
                val_metrics=_sum_states(p.get("val_metrics", []) for p in parts),
                seconds=seconds / len(numbers),
            )
        return RunProgress(
            epochs=epochs,
            batches_per_epoch=max((e.batches for e in epochs.values()), default=0),
            rows=sum(e.rows for e in epochs.values()),
        )

    def command(self, command: Command) -> None:
        """The workers cannot hear it: the driver acts on it between two stages."""

    def checkpoint(self) -> None:
        """None: the driver's own model is what the last whole stage left."""

    def pull(self) -> FloatArray:
        """The weights that the stage returned."""
        return joined_weights(self.rows)

    def optimizer_state(self) -> bytes:
        """The optimizer state that the stage returned."""
        return joined(self.rows, "optimizer")

    def result(self, rows: list[Any]) -> FloatArray:
        """Takes the stage's result in; returns the trained weights."""
        self.rows = rows
        self.trained.rule_state = joined(rows, "rule")
        return joined_weights(rows)


def joined_weights(rows: list[Any]) -> FloatArray:
    """The weights in the result rows of a stage."""
    return np.frombuffer(joined(rows, "weights"), np.float32)


def joined(rows: list[Any], kind: str) -> bytes:
    """What the result rows of a kind hold, one after the other."""
    return b"".join(bytes(r.content) for r in rows if r.kind == kind)


def _sum_states(states: Iterable[Any]) -> npt.NDArray[np.float64]:
    """The sum of metric states; a worker without rows has none."""
    arrays = [np.asarray(state, np.float64) for state in states]
    longest = max((a.size for a in arrays), default=0)
    return sum((np.pad(a, (0, longest - a.size)) for a in arrays), np.zeros(longest))
