"""The driver's end of ``mode='allreduce'``: a coordinator, or the results of the stage alone.

On classic Spark a coordinator in the driver takes the workers' metrics, keeps one worker's state of
the last epoch, and tells the workers to stop. On Spark Connect the workers cannot reach the client:
they return their metrics when the stage ends.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from sparkdl.collective.choice import AllReduceExchange
from sparkdl.collective.communicator import ConnectorOptions, Maker, maker_of
from sparkdl.collective.rules import ExchangeRule, Mean
from sparkdl.collective.strategy import AllReduceStrategy, BarrierStrategy
from sparkdl.config import FitConfig
from sparkdl.coordinator.driver_client import CoordinatorHost, DriverClient
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import sum_states
from sparkdl.errors import TransportError
from sparkdl.files.run_state import RunState
from sparkdl.learner.framework import running_backend
from sparkdl.progress.events import EpochProgress, RunProgress, progress_of
from sparkdl.progress.monitor import Command
from sparkdl.settings.network import require_encryptable
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.spark.fit.training_run import CoordinatedRun, Run, returned_state
from sparkdl.spark.runs.resources import certificate_of, listening_address, rank_listening
from sparkdl.spark.session.running import is_connect
from sparkdl.transport.address import ListenOptions
from sparkdl.weights import Layout

CONNECT_TIMEOUT_S = 20.0
"""Ranks that met through the coordinator connect to each other within seconds, or not at all."""


def reports_live(config: FitConfig, spark: object) -> bool:
    """Whether the driver hears of the workers while they train."""
    return config.with_server or not is_connect(spark)


@contextlib.contextmanager
def start_all_reduce(
    config: FitConfig,
    exchange: AllReduceExchange,
    rule: ExchangeRule,
    layout: Layout,
    rule_state: bytes,
    num_workers: int,
    spark: object,
    tables: str | None = None,
) -> Iterator[Future[Run]]:
    """Starts the coordinator, if workers can reach it; leaving the context ends it.

    Args:
        rule: The rule of ``exchange``, bound to the number of workers and the model's optimizer.
        rule_state: What the rule kept in an earlier run.
        tables: Folder for the rows of a model with tables.
    """
    live = reports_live(config, spark)
    network = config.network
    certificate = certificate_of(spark, network)
    if certificate is not None:
        require_encryptable(config.communicator)
    options: ConnectorOptions = {
        **_limits(config, live),
        **rank_listening(spark, network).options(),
        "certificate": certificate,
    }
    # The mean at every step is faster without a rule: inside the compiled step.
    is_plain = type(exchange.rule) is Mean and exchange.window == 1
    gradients = AllReduceStrategy(
        secrets.token_bytes(32), layout, _communicator(config), options, exchange.wire,
        None if is_plain else rule, exchange.window, rule_state, config.on_nan,
        tables,
    )  # fmt: skip
    run: Future[Run] = Future()
    if not live:
        run.set_result(SilentRun(BarrierStrategy(gradients, None)))
        yield run
        return
    bind, advertised = listening_address(spark, network)
    settings = Settings(
        num_workers,
        lease_s=config.limits.worker_timeout_s,
        start_timeout_s=config.limits.start_timeout_s,
        max_state_bytes=16 * layout.size_bytes + (64 << 20),
    )
    listen = ListenOptions("socket", network.port, bind, advertised, web=False)
    with CoordinatorHost(settings, listen, certificate) as host:
        strategy = BarrierStrategy(gradients, host.endpoint)
        run.set_result(AllReduceRun(host, strategy, num_workers))
        yield run


def _communicator(config: FitConfig) -> str | Maker:
    """Horovod's operations are TensorFlow's: other backends do not import it for nothing."""
    if config.communicator != "auto":
        return maker_of(config.communicator)
    refuses = config.on_nan == "skip"  # which the built-in communicator alone can
    return "auto" if running_backend() == "tensorflow" and not refuses else "builtin"


def _limits(config: FitConfig, live: bool) -> ConnectorOptions:
    """The longest wait of the communicator: for ranks that evaluate or compile, and to connect.

    Ranks that met through the coordinator connect at the same moment; without it one may still
    import its framework.
    """
    start_s = config.limits.start_timeout_s
    return {
        "timeout_s": max(config.limits.worker_timeout_s, start_s),
        "connect_timeout_s": min(CONNECT_TIMEOUT_S, start_s) if live else start_s,
    }


class AllReduceRun(CoordinatedRun):
    """Follows the workers through a coordinator; see :class:`Run`."""

    strategy: BarrierStrategy

    def __init__(self, host: CoordinatorHost, strategy: BarrierStrategy, num_workers: int) -> None:
        self._host, self._num_workers = host, num_workers
        self.strategy = strategy

    @property
    def _driver(self) -> DriverClient:
        return self._host.driver

    def progress(self, since_epoch: int = 0) -> RunProgress:
        return progress_of(self._driver.status(since_epoch), self._num_workers, in_step=True)

    def kept(self) -> RunState | None:
        """The state that one rank left last: weights, optimizer state and the rule's."""
        with contextlib.suppress(TransportError):
            return super().kept()
        return None

    def state(self) -> RunState:
        """The same as :meth:`kept`: the weights travel at the end of an epoch only."""
        kept = self.kept()
        if kept is None:
            raise TransportError(
                "no worker has left its weights with the driver yet",
                expected="the weights after an epoch", received="none",
            )  # fmt: skip
        return kept

    def result(self, trained: Mapping[int, TrainedRank]) -> RunState:
        """The state that one rank left last, at its end."""
        return self.kept() or RunState(0)


@dataclass
class SilentRun(Run):
    """Hears of the workers when their stage has ended, since they cannot reach the driver.

    Args:
        trained: What the ranks of the stage returned.
    """

    strategy: BarrierStrategy
    trained: Mapping[int, TrainedRank] = field(default_factory=dict)

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """Nothing while the stage runs; after it, all epochs."""
        reports = [rank.unreported for rank in self.trained.values()]
        epochs: dict[int, EpochProgress] = {}
        numbers = sorted({number for report in reports for number in report})
        seconds = max((rank.seconds for rank in self.trained.values()), default=0.0)
        for number in numbers:
            parts = [report[number] for report in reports if number in report]
            epochs[number] = EpochProgress(
                missing=0,
                batches=sum(part.batches_done for part in parts),
                rows=sum(part.rows for part in parts),
                metrics=sum_states([part.metrics for part in parts]),
                val_metrics=sum_states([part.val_metrics for part in parts]),
                seconds=seconds / len(numbers),
            )
        return RunProgress(
            epochs=epochs, batches_per_epoch=max((e.batches for e in epochs.values()), default=0),
            rows=sum(e.rows for e in epochs.values()),
        )  # fmt: skip

    def command(self, command: Command) -> None:
        """The workers cannot hear it: the driver acts on it between two stages."""

    def kept(self) -> RunState | None:
        """The results of the stage; None while it runs."""
        return returned_state(self.trained) if self.trained else None

    def state(self) -> RunState:
        """The results of the stage."""
        return returned_state(self.trained)

    def result(self, trained: Mapping[int, TrainedRank]) -> RunState:
        """Takes over what the ranks returned."""
        self.trained = trained
        return returned_state(trained)
