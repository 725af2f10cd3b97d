"""The driver's end of a run while its workers train: by a server, a coordinator, or its results.

With ``mode='allreduce'`` on classic Spark a coordinator in the driver takes the workers' metrics,
keeps one worker's state of the last epoch, and tells the workers to stop. On Spark Connect the
workers cannot reach the client: they return their metrics when the stage ends.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sparkdl.collective.choice import AllReduceExchange
from sparkdl.collective.communicator import ConnectorOptions, Maker, maker_of
from sparkdl.collective.rules import ExchangeRule
from sparkdl.collective.strategy import AllReduceStrategy, BarrierStrategy
from sparkdl.config import FitConfig
from sparkdl.coordinator.driver_client import CoordinatorHost, DriverClient, open_driver
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import sum_states
from sparkdl.errors import TransportError
from sparkdl.files.run_state import RunState
from sparkdl.learner.framework import running_backend
from sparkdl.progress.events import EpochProgress, RunProgress, progress_of
from sparkdl.progress.monitor import Command
from sparkdl.ps.choice import ServerExchange
from sparkdl.ps.client import pull_center
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.server.config import TablesOfRun
from sparkdl.ps.shards.client import ShardsDriver
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.settings.network import require_encryptable
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.spark.fit.shard_servers import ShardServers, beside_driver, count_servers, on_executors
from sparkdl.spark.runs.resources import certificate_of, listening_address, rank_listening
from sparkdl.spark.session.running import is_connect
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference
from sparkdl.training.phases import ServerUsage
from sparkdl.training.syncing import Strategy
from sparkdl.transport.address import ListenOptions
from sparkdl.weights import NO_VALUES, FloatArray, Layout

if TYPE_CHECKING:
    from sparkdl.spark.fit.plan import FitPlan


class Run(Protocol):
    """How the driver follows the workers: through a parameter server, a coordinator, or not."""

    strategy: Strategy
    """How the workers' updates travel; pickled for the executors."""

    @abstractmethod
    def progress(self, since_epoch: int = 0) -> RunProgress:
        """The workers' reports on the epochs from ``since_epoch`` on.

        Raises:
            TransportError: The server has ended.
        """

    def take_lines(self) -> list[tuple[int, str]]:
        """``(rank, line)`` of what the ranks said since the last call; none if nobody hears them.

        Raises:
            TransportError: The server has ended.
        """
        return []

    @abstractmethod
    def command(self, command: Command) -> None:
        """Tells the workers."""

    @abstractmethod
    def kept(self) -> RunState | None:
        """The state that a worker left with the driver after the last epoch; None if none has.

        Its weights are empty where a server holds them.
        """

    @abstractmethod
    def state(self) -> RunState:
        """The workers' present weights, with the optimizer's and the rule's state of :meth:`kept`.

        Raises:
            TransportError: The driver has no weights yet, or the server has ended.
        """

    def member(self, rank: int) -> RunState | None:
        """A rank's own model, where the models never meet; None if it has left none."""
        return None

    @abstractmethod
    def result(self, trained: Mapping[int, TrainedRank]) -> RunState:
        """The trained weights and all that goes with them, given what the ranks returned."""

    def servers(self) -> tuple[ServerUsage, ...]:
        """The work so far of servers that hold the weights together; else nothing."""
        return ()


class CoordinatedRun(Run):
    """The base of runs whose workers a coordinator follows."""

    @property
    @abstractmethod
    def _driver(self) -> DriverClient:
        """The driver's connection to the coordinator."""

    def take_lines(self) -> list[tuple[int, str]]:
        return self._driver.take_lines()

    def command(self, command: Command) -> None:
        self._driver.control(
            stop=command.stop, learning_rate=command.learning_rate, release=command.release,
            changes=command.changes,
        )  # fmt: skip

    def kept(self) -> RunState | None:
        kept = self._driver.kept()
        return RunState.from_bytes(kept) if kept else None

    def member(self, rank: int) -> RunState | None:
        kept = self._driver.kept(rank)
        return RunState.from_bytes(kept) if kept else None


def returned_state(trained: Mapping[int, TrainedRank]) -> RunState:
    """The state that a rank returned for the run; an empty one if none did."""
    states = [rank.state for _, rank in sorted(trained.items()) if rank.state is not None]
    whole = [state for state in states if state.optimizer]
    return [*whole, *states, RunState(0)][0]


_ASK_SERVERS_S = 1.0
"""Seconds between two looks at the servers' work."""


class ServerRun(CoordinatedRun):
    """Follows the workers of a run through its server; see :class:`Run`.

    Args:
        server: The process beside the driver.
        waits: Whether workers wait at an epoch's end although the rule does not ask for it.
        shards: The servers that hold the weights; None: ``server`` does.
        tables: The tables of the model, on the shards; None: it has none.
    """

    strategy: ServerStrategy

    def __init__(
        self,
        server: ServerProcess,
        strategy: ServerStrategy,
        num_workers: int,
        waits: bool = False,
        shards: ShardServers | None = None,
        tables: TablesOfRun | None = None,
    ) -> None:
        self._server, self.strategy, self._num_workers = server, strategy, num_workers
        self._in_step = strategy.rule.blocking or waits
        self._shards = shards
        self._connected: DriverClient | None = None
        self._center: ShardsDriver | None = None
        self._tables = tables
        self._saved = b"" if tables is None else tables.reference
        self._saved_at = 0
        self._usage: tuple[ServerUsage, ...] = ()
        self._ask_servers_at = 0.0

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        plan: FitPlan,
        exchange: ServerExchange,
        layout: Layout,
        center: FloatArray,
        tables: TablesOfRun | None = None,
    ) -> Iterator[Future[ServerRun]]:
        """Starts the server's process in the background; leaving the context ends it."""
        config, spark, waits = plan.config, plan.source.spark, plan.settings.wait_for_driver
        num_workers, at_once, network = plan.num_workers, plan.at_once, config.network
        bind, advertised = listening_address(spark, network)
        server_config = ServerConfig(
            layout,
            exchange.rule.bind(num_workers),
            num_workers,
            mode=config.parameter_server_mode,  # type: ignore[arg-type]
            port=network.port,
            bind_address=bind,
            advertised_address=advertised,
            settings=Settings(
                num_workers,
                lease_s=config.limits.worker_timeout_s,
                start_timeout_s=config.limits.start_timeout_s,
                gather=at_once,
            ),
            codec=None if exchange.codec is None else exchange.codec.bind(num_workers),
            certificate=certificate_of(spark, network),
            together=waits,
        )

        servers, cancelled = contextlib.ExitStack(), threading.Event()

        def begin() -> ServerRun:
            count = count_servers(network, num_workers, at_once, spark)
            shards: ShardServers | None = None
            if network.servers == "executors":
                limit_s = config.limits.start_timeout_s
                shards = servers.enter_context(
                    on_executors(
                        server_config, center, count, spark, network, limit_s, tables, cancelled
                    )
                )
            elif count > 1 or tables is not None:
                shards = servers.enter_context(beside_driver(server_config, center, count, tables))
            own, first = server_config, center
            if shards is not None:
                own, first = replace(server_config, sharded=True), np.empty(0, np.float32)
            server = ServerProcess(own, first, wait=False)  # the job may start meanwhile
            strategy = ServerStrategy(
                server.endpoint, layout, server_config.rule,
                compression=server_config.compression(), on_nan=config.on_nan, at_once=at_once,
                shards=() if shards is None else shards.endpoints, with_tables=tables is not None,
            )  # fmt: skip
            return cls(server, strategy, num_workers, waits, shards, tables)

        with servers, ThreadPoolExecutor(1, thread_name_prefix="sparkdl-server") as pool:
            starting = pool.submit(begin)
            try:
                yield starting
            finally:
                cancelled.set()
                if starting.exception() is None:
                    starting.result().close()

    @property
    def _driver(self) -> DriverClient:
        self._check()
        if self._connected is None:
            self._server.wait_ready()
            layout = self.strategy.layout if self._shards is None else NO_VALUES
            self._connected = open_driver(
                self._server.endpoint, limits_of(layout), check=self._check
            )
            if self._shards is not None:
                self._shards.wait_ready()
                endpoints = self.strategy.shards
                self._center = ShardsDriver(endpoints, self.strategy.layout, self._check)
        return self._connected

    def _check(self) -> None:
        self._server.check()
        if self._shards is not None:
            self._shards.check()

    @property
    def server_lost(self) -> bool:
        """Whether a server has ended, so that nothing can be read from it any more."""
        try:
            self._check()
        except TransportError:
            return True
        return False

    def command(self, command: Command) -> None:
        """Tells the workers; the servers first, where they hold what a callback wrote."""
        if command.changes and self._shards is not None:
            _ = self._driver
            assert self._center is not None
            self._center.write(command.changes)
        super().command(command)

    def close(self) -> None:
        """Ends the server."""
        if self._center is not None:
            self._center.close()
        if self._connected is not None:
            self._connected.close()
        self._server.stop()

    def progress(self, since_epoch: int = 0) -> RunProgress:
        status = self._driver.status(since_epoch)
        found = progress_of(status, self._num_workers, in_step=self._in_step)
        now = time.monotonic()
        if self._center is not None and now >= self._ask_servers_at:
            self._ask_servers_at, self._usage = now + _ASK_SERVERS_S, self._center.usage()
        return replace(found, servers=self._usage)

    def state(self) -> RunState:
        """The present center (a copy), and what :meth:`kept` has."""
        kept, driver = self.kept() or RunState(0), self._driver
        commits = driver.status().clock  # before the pull, of whose round the rows are
        center = pull_center(driver) if self._center is None else self._center.pull(driver)
        return replace(kept, weights=center, rule=self._save_rows(commits))

    def _save_rows(self, commits: int) -> bytes:
        """Has the servers write the rows of tables, if there were pushes since they did last."""
        if self._tables is None:
            return b""
        if not self._saved or commits > self._saved_at:
            assert self._center is not None
            files = TableCheckpoints(self._tables.folder)
            names = tuple(sorted(spec.name for spec in self._tables.specs))
            before = TableReference.from_bytes(self._saved).step if self._saved else 0
            reference = files.after(self._saved, before + commits - self._saved_at, names)
            self._center.save_rows(reference)
            files.finish(reference, len(self.strategy.shards), self._saved)
            self._saved, self._saved_at = reference.to_bytes(), commits
        return self._saved

    def servers(self) -> tuple[ServerUsage, ...]:
        _ = self._driver
        return () if self._center is None else self._center.usage()

    def result(self, trained: Mapping[int, TrainedRank]) -> RunState:
        """The center, and the optimizer state that a worker left with the server."""
        return self.state()


CONNECT_TIMEOUT_S = 20.0
"""Ranks that met through the coordinator connect to each other within seconds, or not at all."""


def reports_live(config: FitConfig, spark: object) -> bool:
    """Whether the driver hears of the workers while they train."""
    return config.with_server or not is_connect(spark)


@contextlib.contextmanager
def start_all_reduce(
    plan: FitPlan,
    exchange: AllReduceExchange,
    rule: ExchangeRule,
    layout: Layout,
    rule_state: bytes,
    tables: str | None = None,
) -> Iterator[Future[Run]]:
    """Starts the coordinator, if workers can reach it; leaving the context ends it.

    Args:
        rule: The rule of ``exchange``, bound to the number of workers and the model's optimizer.
        rule_state: What the rule kept in an earlier run.
        tables: Folder for the rows of a model with tables.
    """
    config, spark, network = plan.config, plan.source.spark, plan.config.network
    live = reports_live(config, spark)
    certificate = certificate_of(spark, network)
    if certificate is not None:
        require_encryptable(config.communicator)
    options: ConnectorOptions = {
        **_limits(config, live),
        **rank_listening(spark, network).options(),
        "certificate": certificate,
    }
    # The mean at every step is faster without a rule: inside the compiled step.
    is_plain = exchange.joins_gradients and exchange.window == 1
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
        plan.num_workers,
        lease_s=config.limits.worker_timeout_s,
        start_timeout_s=config.limits.start_timeout_s,
        max_state_bytes=16 * layout.size_bytes + (64 << 20),
    )
    listen = ListenOptions("socket", network.port, bind, advertised, web=False)
    with CoordinatorHost(settings, listen, certificate) as host:
        strategy = BarrierStrategy(gradients, host.endpoint)
        run.set_result(AllReduceRun(host, strategy, plan.num_workers))
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
        self._host, self.strategy, self._num_workers = host, strategy, num_workers

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
