"""The servers that hold the weights of a run together: beside the driver, or as tasks of Spark."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparkdl.coordinator.driver_client import CoordinatorHost
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ResourceError, SparkDLError, TransportError
from sparkdl.failures import RankFailure
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.server.config import TablesOfRun, shards_of
from sparkdl.settings.network import Network
from sparkdl.spark.executor.shard_task import ShardTask, endpoint_of
from sparkdl.spark.runs.capacity import count_slots
from sparkdl.spark.runs.launcher import SparkLauncher, SparkRanks
from sparkdl.spark.runs.resources import rank_listening
from sparkdl.transport.address import Endpoint, ListenOptions
from sparkdl.weights import FloatArray

_LOOK_S = 0.1
_STOP_S = 10.0


@dataclass(frozen=True)
class ServersBesideDriver:
    """Processes of this machine."""

    servers: list[ServerProcess]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The servers, in the order of their ranges."""
        return tuple(server.endpoint for server in self.servers)

    def check(self) -> None:
        """Raises TransportError if one of them has ended."""
        for server in self.servers:
            server.check()

    def wait_ready(self) -> None:
        """Returns when all of them answer."""
        for server in self.servers:
            server.wait_ready()


def count_servers(network: Network, num_workers: int, at_once: int, spark: object) -> int:
    """The servers of a run; see :class:`Network`.

    Args:
        at_once: How many workers run at the same time (0: unknown).
    """
    if network.num_servers != "auto":
        return int(network.num_servers)
    if network.servers == "driver":
        return 1
    workers = at_once or num_workers
    slots = count_slots(spark)
    spare = workers if slots is None else slots - workers
    return max(1, min(workers, spare))


@contextlib.contextmanager
def beside_driver(
    config: ServerConfig, center: FloatArray, count: int, tables: TablesOfRun | None
) -> Iterator[ServersBesideDriver]:
    """Starts ``count`` servers beside the driver; leaving the context ends them.

    Raises:
        ConfigError: There are more servers than weights.
        ResourceError: There are not enough free ports.
    """
    with contextlib.ExitStack() as stack:
        servers = []
        for shard in shards_of(config, count, tables):
            server = ServerProcess(shard, center[shard.place], wait=False)
            stack.callback(server.stop)
            servers.append(server)
        yield ServersBesideDriver(servers)


@dataclass(frozen=True)
class ServersOnExecutors:
    """Tasks of one barrier stage, each with a slot of its own."""

    ranks: SparkRanks
    endpoints: tuple[Endpoint, ...]

    def check(self) -> None:
        if self.ranks.wait(0.0):
            raise _ended(self.ranks)

    def wait_ready(self) -> None:
        """They answered before their addresses were known."""


ShardServers = ServersBesideDriver | ServersOnExecutors
"""Servers of which each holds a range of the weights."""


@contextlib.contextmanager
def on_executors(
    config: ServerConfig,
    center: FloatArray,
    count: int,
    spark: Any,
    network: Network,
    timeout_s: float,
    tables: TablesOfRun | None,
    cancelled: threading.Event,
) -> Iterator[ServersOnExecutors]:
    """Starts ``count`` servers as tasks of Spark; leaving the context ends them.

    Args:
        timeout_s: For all of them to come up.
        cancelled: Set where nobody waits for them any more.

    Raises:
        ConfigError: There are more servers than weights.
        ResourceError: They did not come up in time.
        TransportError: One of them ended.
    """
    shards_of(config, count)  # refuses what cannot be before a job starts
    settings = Settings(count, start_timeout_s=timeout_s)
    listen = ListenOptions("socket", 0, config.bind_address, config.advertised_address, web=False)

    def endpoints(host: CoordinatorHost, ranks: SparkRanks) -> tuple[Endpoint, ...]:
        """The servers' endpoints, as soon as all have told theirs."""
        certificate = config.certificate
        fingerprint = "" if certificate is None else certificate.fingerprint
        deadline = time.monotonic() + timeout_s
        found: dict[int, Endpoint] = {}
        while len(found) < count:
            if ranks.wait(_LOOK_S):
                raise _ended(ranks)
            for rank in range(count):
                kept = b"" if rank in found else bytes(host.driver.kept(rank))
                if kept:
                    found[rank] = endpoint_of(kept, config.token, fingerprint)
            if cancelled.is_set() or time.monotonic() > deadline:
                missing = [str(rank) for rank in range(count) if rank not in found]
                raise ResourceError(
                    "the parameter servers did not start on the executors",
                    expected=f"{count} task slots within {timeout_s:g} s, beside the workers'",
                    received=f"nothing from servers {', '.join(missing)}",
                    hint="fewer workers or servers, more executors, or servers='driver'",
                )
        return tuple(found[rank] for rank in range(count))

    with CoordinatorHost(settings, listen, config.certificate) as host:
        task = ShardTask(config, center, rank_listening(spark, network), host.endpoint, tables)
        launcher = SparkLauncher(
            spark.range(0, count, 1, count), count, barrier=True,
            description="sparkdl: parameter servers", noun="stage of parameter servers",
        )  # fmt: skip
        with launcher.launch(task) as ranks:
            try:
                yield ServersOnExecutors(ranks, endpoints(host, ranks))
            finally:
                with contextlib.suppress(SparkDLError):
                    host.driver.control(stop=True)
                    ranks.wait(_STOP_S)


def _ended(ranks: SparkRanks) -> SparkDLError:
    received = "tasks that returned"
    try:
        ranks.results()
    except RankFailure as error:
        received = str(error.failure.library_error())
    except SparkDLError as error:
        received = str(error)
    return TransportError(
        "the parameter servers on the executors ended",
        expected="servers that run until the fit has ended", received=received,
    )  # fmt: skip
