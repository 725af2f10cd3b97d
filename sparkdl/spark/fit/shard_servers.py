"""The servers that hold the weights of a run together: beside the driver, or as tasks of Spark."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from sparkdl.coordinator.driver_client import CoordinatorHost
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.session import open_session
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ResourceError, SparkDLError, TransportError
from sparkdl.failures import RankFailure
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.task import RaisingTask, RankContext
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.server.config import TablesOfRun, shards_of
from sparkdl.settings.network import Network, RankListening
from sparkdl.spark.runs.capacity import count_slots
from sparkdl.spark.runs.launcher import SparkLauncher, SparkRanks
from sparkdl.spark.runs.resources import rank_listening
from sparkdl.transport.address import Address, Endpoint, ListenOptions
from sparkdl.transport.frames import Message
from sparkdl.weights import FloatArray
from sparkdl.wire.hosts import rank_addresses

_LOOK_S, _BEAT_S = 0.1, 0.5
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
class ShardTask(RaisingTask):
    """Serves one range of the weights until the driver says stop, or is gone.

    Args:
        center: The weights to begin with, of all servers.
        meeting: The coordinator of the servers, at the driver.
    """

    config: ServerConfig
    center: FloatArray
    listening: RankListening
    meeting: Endpoint
    tables: TablesOfRun | None = None

    @property
    def devices(self) -> DeviceRequest:
        """None: it adds and copies."""
        return DeviceRequest(None, False)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The server's process lives as long as this task."""
        listening = self.listening
        bind, advertised = rank_addresses(listening.bind, None, listening.towards)
        config = replace(
            self.config, bind_address=bind, advertised_address=advertised, port=listening.port
        )
        shard = shards_of(config, rank.num_ranks, self.tables)[rank.rank]
        with (
            ServerProcess(shard, self.center[shard.place]) as server,
            open_session(self.meeting, rank=rank.rank, attempt=rank.attempt) as session,
        ):
            session.join()
            place = {"address": asdict(server.address), "host": socket.gethostname()}
            session.keep([json.dumps(place).encode()], 0, own=True)
            while not session.stopped:
                time.sleep(_BEAT_S)
                server.check()
                try:
                    session.request(Message(CoordinatorKind.HEARTBEAT))
                except SparkDLError:  # the driver is gone, or has ended the run
                    break
            session.finish()
        return iter(())


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
                    address = Address(**json.loads(kept)["address"])
                    found[rank] = Endpoint(address, config.token, fingerprint)
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
