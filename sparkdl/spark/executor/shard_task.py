"""``ShardTask``: a parameter server that holds a range of the weights, as a task of Spark."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.session import open_session
from sparkdl.errors import SparkDLError
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.task import RaisingTask, RankContext
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.server.config import TablesOfRun, shards_of
from sparkdl.settings.network import RankListening
from sparkdl.transport.address import Address, Endpoint
from sparkdl.transport.frames import Message
from sparkdl.weights import FloatArray
from sparkdl.wire.hosts import rank_addresses

_LOOK_S = 0.5


@dataclass(frozen=True)
class ShardTask(RaisingTask):
    """Serves one range of the weights until the driver says stop, or is gone.

    Args:
        center: The weights to begin with, of all servers.
        listening: Where this server listens.
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
                time.sleep(_LOOK_S)
                server.check()
                try:
                    session.request(Message(CoordinatorKind.HEARTBEAT))
                except SparkDLError:  # the driver is gone, or has ended the run
                    break
            session.finish()
        return iter(())


def endpoint_of(kept: bytes, token: str, fingerprint: str) -> Endpoint:
    """The endpoint of a server from what its task left with the driver.

    Args:
        token: The run's secret.
        fingerprint: Fingerprint of the run's certificate; empty without encryption.
    """
    return Endpoint(Address(**json.loads(kept)["address"]), token, fingerprint)
