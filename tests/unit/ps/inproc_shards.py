"""A center on several servers, without processes and without sockets."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from sparkdl.coordinator.session import Session
from sparkdl.process.closing import Closing
from sparkdl.ps.kinds import DECISION, StoreKind, compression_of, limits_of, ranges_of
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.server.config import TablesOfRun, shards_of
from sparkdl.ps.shards.client import ShardClient, ShardedClient
from sparkdl.testing.inproc import InprocServer
from sparkdl.training.changes import VariableChanges
from sparkdl.transport.connection import Timeouts
from sparkdl.transport.frames import Message
from sparkdl.weights import NO_VALUES, FloatArray


class InprocShards(Closing):
    """A coordinator and shards; the clients are as those of real servers.

    Args:
        center: Initial weights; copied.
    """

    def __init__(
        self,
        config: ServerConfig,
        center: FloatArray,
        count: int,
        tables: TablesOfRun | None = None,
    ) -> None:
        self.config = config
        self.ranges = ranges_of(config.layout, count)
        decider = replace(config, sharded=True)
        self.coordinator = decider.coordinator(np.empty(0, np.float32))
        self.server = InprocServer(self.coordinator, config.token)
        self.shards = [
            InprocServer(shard.service(center[shard.place].copy()), config.token)
            for shard in shards_of(config, count, tables)
        ]

    def client(
        self, rank: int = 0, attempt: int = 0, timeouts: Timeouts | None = None
    ) -> ShardedClient:
        """A worker's client."""
        config = self.config
        flat = np.zeros(config.layout.size, np.float32)
        session = Session(
            self.server.opener(), limits_of(NO_VALUES), rank=rank, attempt=attempt,
            timeouts=timeouts,
        )  # fmt: skip
        shards = [
            ShardClient(
                self.shards[i].opener(), r, flat[r.place], rank=rank, attempt=attempt, number=i,
                compression=compression_of(config.compression(), r), timeouts=timeouts,
            )
            for i, r in enumerate(self.ranges)
        ]  # fmt: skip
        return ShardedClient(session, shards, flat, config.rule, config.layout)

    @property
    def center(self) -> FloatArray:
        """A copy of the center, as the coordinator has decided it."""
        with self.server.driver() as driver:
            meta = driver.request(Message(StoreKind.PULL)).meta
        center = np.empty(self.config.layout.size, np.float32)
        wanted = {DECISION: meta[DECISION]} if DECISION in meta else {}
        for shard, range_ in zip(self.shards, self.ranges, strict=True):
            with shard.driver() as driver:
                driver.request(Message(StoreKind.PULL, meta=dict(wanted)))
                size = range_.layout.size_bytes
                center[range_.place] = driver.raw[:size].view(np.float32)
        return center

    def write(self, changes: VariableChanges) -> None:
        """Gives the center what callbacks wrote."""
        for shard in self.shards:
            content = np.frombuffer(changes.to_bytes(), np.uint8)
            message = Message(StoreKind.WRITE, total=content.size, body=content)
            shard.dispatcher.call(shard.dispatcher.open(), message, lambda: True)

    def close(self) -> None:
        """Ends all waits."""
        with contextlib.ExitStack() as stack:
            for server in (self.server, *self.shards):
                stack.callback(server.close)
