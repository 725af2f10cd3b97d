"""The driver's connections to the shards of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from sparkdl.coordinator.blobs import chunked
from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.process.closing import Closing
from sparkdl.ps.kinds import DECISION, StoreKind, limits_of, ranges_of
from sparkdl.tables.checkpoints import TableReference
from sparkdl.training.changes import VariableChanges
from sparkdl.training.phases import ServerUsage
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Connection, Timeouts
from sparkdl.transport.frames import Message
from sparkdl.transport.openers import explained, openers_of
from sparkdl.weights import FloatArray, Layout


class ShardsDriver(Closing):
    """Reads the center from all shards, and writes to it. One thread uses it.

    Args:
        endpoints: Endpoints of the shards, in order.
        check: Called before a request is tried again; raises if a shard has ended.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], layout: Layout, check: Callable[[], None]
    ) -> None:
        self._endpoints = endpoints
        self._layout, self._ranges = layout, ranges_of(layout, len(endpoints))
        self._connections: list[Connection] = []
        self._decided: dict[str, Any] = {}
        timeouts = Timeouts()
        try:
            for number, endpoint in enumerate(endpoints):
                limits = limits_of(self._ranges[number].layout)
                opener = openers_of(endpoint, "auto", limits, timeouts)
                connection = Connection(
                    opener, limits, timeouts, buffered=True,
                    name=f"the driver (server {number})", check=check,
                )  # fmt: skip
                self._connections.append(connection)
                with explained(opener, timeouts):
                    connection.open()
        except BaseException:
            self.close()
            raise

    def pull(self, coordinator: DriverClient) -> FloatArray:
        """A copy of the center as the coordinator has decided it."""
        reply = coordinator.request(Message(StoreKind.PULL))
        meta = {DECISION: reply.meta[DECISION]} if DECISION in reply.meta else {}
        self._decided = meta
        center = np.empty(self._layout.size, np.float32)
        for connection, range_ in zip(self._connections, self._ranges, strict=True):
            connection.request(Message(StoreKind.PULL, meta=dict(meta)))
            size = range_.layout.size_bytes
            center[range_.place] = connection.raw[:size].view(np.float32)
        return center

    def write(self, changes: VariableChanges) -> None:
        """Gives the center what callbacks wrote to the weights."""
        content = changes.to_bytes()
        for connection, range_ in zip(self._connections, self._ranges, strict=True):
            limit = limits_of(range_.layout).chunk_bytes
            for frame, chunk in chunked(Message(StoreKind.WRITE), [content], limit):
                connection.request(frame, chunk)

    def usage(self) -> tuple[ServerUsage, ...]:
        """The work of the servers so far, in the order of their ranges."""
        found = []
        for connection, endpoint in zip(self._connections, self._endpoints, strict=True):
            meta = connection.request(Message(StoreKind.TELL)).meta
            numbers = meta["numbers"]
            found.append(
                ServerUsage(
                    endpoint.address.host, int(meta["memory_bytes"]), int(numbers["bytes_in"]),
                    int(numbers["bytes_out"]), int(numbers["table_rows"]),
                    float(numbers["rows_staleness"]), int(numbers["busy"]),
                )
            )  # fmt: skip
        return tuple(found)

    def save_rows(self, reference: TableReference) -> None:
        """Has all shards write the rows of the tables; training goes on meanwhile.

        In rounds they are those of the round of the last :meth:`pull`.
        """
        asked = [
            c.request(Message(StoreKind.ROWS_CLOCKS, meta=dict(self._decided))).meta["clocks"]
            for c in self._connections
        ]
        # Deltas from the earliest clock on miss nothing that a shard with a later one has changed.
        clocks = {name: min(found[name] for found in asked) for name in reference.tables}
        meta = {"reference": reference.to_bytes().decode(), "clocks": clocks}

        def save(connection: Connection) -> None:
            connection.request(Message(StoreKind.ROWS_SAVE, meta=dict(meta)), deferred=True)

        with ThreadPoolExecutor(len(self._connections)) as threads:
            for _ in threads.map(save, self._connections):
                pass

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
