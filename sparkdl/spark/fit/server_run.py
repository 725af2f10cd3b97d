"""``ServerRun``: the driver's end of a run with a parameter server, and the server's process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from sparkdl.config import FitConfig
from sparkdl.coordinator.driver_client import DriverClient, open_driver
from sparkdl.coordinator.settings import Settings
from sparkdl.progress.run_progress import RunProgress, progress_of
from sparkdl.ps.choice import ServerExchange
from sparkdl.ps.client import pull_center
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.spark.fit.training_run import CoordinatedRun
from sparkdl.spark.runs.network import certificate_of, listening_address
from sparkdl.training.run_state import RunState
from sparkdl.weights import FloatArray, Layout


class ServerRun(CoordinatedRun):
    """Follows the workers of a run through its server; see :class:`Run`.

    Args:
        server: The process beside the driver.
        strategy: How the workers reach it.
        num_workers: Workers of the run.
        waits: Whether they wait at an epoch's end although the rule does not ask for it.
    """

    def __init__(
        self, server: ServerProcess, strategy: ServerStrategy, num_workers: int, waits: bool = False
    ) -> None:
        self._server, self.strategy, self._num_workers = server, strategy, num_workers
        self._in_step = strategy.rule.blocking or waits
        self._connected: DriverClient | None = None

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
        spark: Any,
        *,
        waits: bool = False,
    ) -> Iterator[Future[ServerRun]]:
        """Starts the server's process in the background; leaving the context ends it.

        Args:
            config: Ports, addresses and time limits.
            exchange: The rule that the server applies.
            layout: Of the center.
            center: The weights to begin with.
            num_workers: Workers of the run.
            at_once: How many of them begin together (0: unknown).
            spark: The session.
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

        def begin() -> ServerRun:
            server = ServerProcess(server_config, center, wait=False)  # the job may start meanwhile
            strategy = ServerStrategy(
                server.endpoint,
                layout,
                server_config.rule,
                compression=server_config.compression(),
                on_nan=config.on_nan,
                at_once=at_once,
            )
            return cls(server, strategy, num_workers, waits)

        with ThreadPoolExecutor(1, thread_name_prefix="sparkdl-server") as pool:
            starting = pool.submit(begin)
            try:
                yield starting
            finally:
                if starting.exception() is None:
                    starting.result().close()

    @property
    def _driver(self) -> DriverClient:
        """The driver's connection. The first use waits until the server is up.

        Raises:
            TransportError: The server has ended.
        """
        self._server.check()
        if self._connected is None:
            self._server.wait_ready()
            self._connected = open_driver(
                self._server.endpoint, limits_of(self.strategy.layout), check=self._server.check
            )
        return self._connected

    def close(self) -> None:
        """Ends the server."""
        if self._connected is not None:
            self._connected.close()
        self._server.stop()

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """The workers' reports."""
        status = self._driver.status(since_epoch)
        return progress_of(status, self._num_workers, in_step=self._in_step)

    def state(self) -> RunState:
        """The present center (a copy), and what :meth:`kept` has."""
        return replace(self.kept() or RunState(0), weights=pull_center(self._driver))

    def result(self, trained: Mapping[int, TrainedRank]) -> RunState:
        """The center, and the optimizer state that a worker left with the server."""
        return self.state()
