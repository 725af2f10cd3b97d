"""``ServerRun``: the driver's end of a run with a parameter server, and the server's process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from sparkdl.config import FitConfig
from sparkdl.coordinator.driver_client import DriverClient, open_driver
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import TransportError
from sparkdl.files.run_state import RunState
from sparkdl.progress.events import RunProgress, progress_of
from sparkdl.progress.monitor import Command
from sparkdl.ps.choice import ServerExchange
from sparkdl.ps.client import pull_center
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.server.config import TablesOfRun
from sparkdl.ps.shards.client import ShardsDriver
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.spark.fit.shard_servers import ShardServers, beside_driver, count_servers, on_executors
from sparkdl.spark.fit.training_run import CoordinatedRun
from sparkdl.spark.runs.resources import certificate_of, listening_address
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference
from sparkdl.training.phases import ServerUsage
from sparkdl.weights import NO_VALUES, FloatArray, Layout

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
        config: FitConfig,
        exchange: ServerExchange,
        layout: Layout,
        center: FloatArray,
        num_workers: int,
        at_once: int,
        spark: object,
        *,
        waits: bool = False,
        tables: TablesOfRun | None = None,
    ) -> Iterator[Future[ServerRun]]:
        """Starts the server's process in the background; leaving the context ends it.

        Args:
            at_once: How many workers begin together (0: unknown).
            waits: Whether the workers wait for the driver at an epoch's end.
        """
        network = config.network
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
