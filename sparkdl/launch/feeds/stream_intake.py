"""The intake of a rank for the rows of micro-batches, which tasks of Spark send."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from sparkdl.coordinator.blobs import Assembly, chunked
from sparkdl.data.feed import RowSpool, size_of
from sparkdl.errors import ProtocolError, SparkDLError
from sparkdl.launch.feeds.stream_store import StreamKind
from sparkdl.transport.address import Address, Endpoint
from sparkdl.transport.connection import Connection, Timeouts
from sparkdl.transport.frames import (
    ByteArray,
    Flag,
    FrameKind,
    FrameLimits,
    Kind,
    Message,
    error_to_meta,
    kinds_of,
)
from sparkdl.transport.openers import explained, openers_of
from sparkdl.transport.service import Metric, Replies

_MOST_BYTES = 1 << 36
_SEND_BYTES = 8 << 20
"""The bytes of rows that travel together, roughly."""
_TIMEOUTS = Timeouts(connect_s=10.0, reconnect_s=5.0, reply_s=120.0)


def _assembly() -> Assembly:
    return Assembly("rows of a stream", _MOST_BYTES)


@dataclass
class _Sent:
    """The rows of a micro-batch that one attempt to send it has sent."""

    spool: RowSpool
    assembly: Assembly = field(default_factory=_assembly)
    last: int = 0


class StreamIntake:
    """Keeps the rows that are sent to a rank; see :class:`sparkdl.transport.service.Service`.

    What an attempt sends is kept apart: of a task that Spark repeats only the attempt counts that
    the driver names.

    Args:
        memory_budget_bytes: Rows of a micro-batch beyond this go to the rank's disk.
    """

    def __init__(self, memory_budget_bytes: int) -> None:
        self._budget = memory_budget_bytes
        self._lock = threading.Lock()
        self._buffers: dict[int, ByteArray] = {}
        self._sent: dict[tuple[int, int], _Sent] = {}
        self._taken = -1
        self._closed = False
        self.bytes_in = self.bytes_out = 0
        self.limits = FrameLimits(kinds=kinds_of(StreamKind))
        self.idle_s = 60.0
        self.beside: frozenset[FrameKind] = frozenset()
        self.parting = self.beside

    # -- the rank's function -----------------------------------------------------------------------

    def take(self, number: int, attempt: int) -> Sequence[pa.RecordBatch]:
        """The rows of an offer; those of other attempts and of former offers are dropped."""
        with self._lock:
            sent = self._sent.get((number, attempt))
            self._taken = number
            self._sent = {key: kept for key, kept in self._sent.items() if key[0] > number}
        return [] if sent is None else sent.spool.finish()

    def refuse(self) -> None:
        """Drops what comes from now on: the function takes no more."""
        with self._lock:
            self._closed = True
            self._sent.clear()

    # -- the transport -----------------------------------------------------------------------------

    def buffer(self, connection: int) -> ByteArray:
        with self._lock:
            if connection not in self._buffers:
                self._buffers[connection] = self.limits.allocate()
            return self._buffers[connection]

    def attach(self, connection: int, buffer: ByteArray) -> None:
        with self._lock:
            self._buffers[connection] = buffer

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        """Keeps rows; answers at once."""
        try:
            return [(connection, Message(Kind.OK, meta=dict(self._keep(message))))]
        except SparkDLError as error:
            return [(connection, Message(Kind.ERROR, meta=error_to_meta(error)))]

    def _keep(self, message: Message) -> dict[str, int | bool]:
        number = message.meta.get("number")
        if message.kind is not StreamKind.ROWS or not isinstance(number, int):
            raise ProtocolError(
                "a rank takes the rows of micro-batches here",
                expected="a ROWS frame with the number of an offer",
                received=message.kind.name,
            )
        with self._lock:
            if self._closed or number <= self._taken:
                return {"left": True}
            key = number, message.attempt
            sent = self._sent.setdefault(key, _Sent(RowSpool(self._budget)))
        if message.sequence > sent.last:  # else it came before, and its answer was lost
            whole = None
            if message.total:
                if message.offset == 0:  # one of the same size as before is no repetition of it
                    sent.assembly = _assembly()
                whole = sent.assembly.put(message)
            if whole is not None:
                for batch in pa.ipc.open_stream(pa.py_buffer(whole)):
                    sent.spool.add(batch)
            sent.last = message.sequence
        return {"rows": sent.spool.num_rows}

    def disconnect(self, connection: int, now: float) -> Replies:
        with self._lock:
            self._buffers.pop(connection, None)
        return []

    def tick(self, now: float) -> Replies:
        """Nothing waits here."""
        return []

    def metrics(self) -> list[Metric]:
        return []


def send_rows(
    batches: Iterable[pa.RecordBatch],
    address: tuple[str, int],
    token: str,
    fingerprint: str,
    *,
    number: int,
    attempt: int,
) -> int:
    """Sends rows to a rank.

    Returns:
        How many the rank has now; 0 if it takes none any more.

    Raises:
        TransportError: The rank cannot be reached, or is gone.
        ResourceError: Its disk is full.
    """
    host, port = address
    endpoint = Endpoint(Address("", host, port, mode="socket"), token, fingerprint)
    limits = FrameLimits()
    opener = openers_of(endpoint, "socket", limits, _TIMEOUTS)
    connection = Connection(opener, limits, _TIMEOUTS, buffered=False, name="a feeding task")
    sequence = 0

    first = Message(StreamKind.ROWS, Flag.NONE, rank=0, attempt=attempt, meta={"number": number})

    def request(message: Message, body: ByteArray | int) -> Message:
        nonlocal sequence
        sequence += 1
        message.sequence = sequence
        return connection.request(message, body)

    try:
        with explained(opener, _TIMEOUTS):
            connection.open()
        rows = 0
        for count, blob in _packed(batches):
            rows += count
            for message, chunk in chunked(first, [blob], limits.chunk_bytes):
                if request(message, chunk).meta.get("left"):
                    return 0
        kept = request(first, 0).meta
    finally:
        connection.close()
    if not kept.get("left") and kept.get("rows") != rows:
        raise ProtocolError(
            "a rank has received other rows than were sent to it",
            expected=f"{rows} rows",
            received=f"{kept.get('rows')}",
        )
    return 0 if kept.get("left") else rows


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterable[tuple[int, ByteArray]]:
    """The rows as Arrow streams of some megabytes each, and how many are in each."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        size += size_of(batch)
        if size >= _SEND_BYTES:
            yield sum(one.num_rows for one in waiting), _stream_of(waiting)
            waiting, size = [], 0
    if waiting:
        yield sum(one.num_rows for one in waiting), _stream_of(waiting)


def _stream_of(batches: list[pa.RecordBatch]) -> ByteArray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return np.frombuffer(sink.getvalue(), np.uint8)
