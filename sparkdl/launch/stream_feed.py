"""``StreamFeed``: the rows of a rank where they have no end, and who takes them in.

And what driver and ranks tell each other meanwhile: no rows, only where these are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from sparkdl.coordinator.blobs import Assembly, chunked
from sparkdl.coordinator.group import Group, Store, Work, Worker, require_driver
from sparkdl.data.feed import Columns, Feed, RowSpool, size_of
from sparkdl.errors import ProtocolError, SparkDLError
from sparkdl.launch.feeding import FunctionFeed
from sparkdl.process.closing import Closing
from sparkdl.settings.network import RankListening
from sparkdl.settings.values import require_int
from sparkdl.transport.address import Address, Endpoint, Listeners, ListenOptions
from sparkdl.transport.connection import Connection, Timeouts
from sparkdl.transport.frames import (
    Body,
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
from sparkdl.transport.server import Server
from sparkdl.transport.service import BufferedService, Replies
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.tls import Certificate

LONGEST_WAIT_S = 5.0
"""Seconds after which a rank that waits for rows is answered; it asks again, and knows us alive."""
Told = dict[str, int | bool]


@dataclass(frozen=True)
class Offer:
    """A micro-batch that the ranks have received.

    Args:
        number: Number of the offer, from 0 in each run.
        batch_id: Spark's number of the micro-batch.
        rows: Rank -> rows that it gives to its function.
        attempts: Rank -> the attempt of the task that sent them.
    """

    number: int
    batch_id: int
    rows: Mapping[int, int]
    attempts: Mapping[int, int]


class StreamKind(FrameKind):
    """The frames that feed ranks from a stream."""

    NEXT_ROWS = 48  # a rank says where it listens, asks for rows, or takes none any more
    OFFER = 49  # driver: the ranks have the rows of a micro-batch; or there are no more
    ROWS = 50, Body.CHUNK  # rows on their way to a rank


class StreamStore(Store):
    """The ranks' addresses, the rows that they are offered, and those that they have taken.

    Ranks ask over connections of their own beside their session, which carries their lines.
    """

    limits = FrameLimits(kinds=kinds_of(StreamKind))
    kinds = frozenset({StreamKind.NEXT_ROWS, StreamKind.OFFER})

    def __init__(self) -> None:
        self.addresses: dict[int, tuple[str, int]] = {}
        """Rank -> where it listens for rows."""
        self.taken: dict[int, int] = {}
        """Rank -> number of the last offer whose rows its function has taken, all of them."""
        self.left: set[int] = set()
        """Ranks whose function takes no more rows."""
        self.began_again: set[int] = set()
        """Ranks that listen for the second time: what they had been sent is gone."""
        self._offer: Offer | None = None
        self._ended = False
        self._asking: dict[int, tuple[Worker, float]] = {}

    def attach(self, group: Group) -> None:
        super().attach(group)
        self._changed = threading.Condition(group.lock)

    def offer(self, offer: Offer | None) -> Message:
        """Makes an offer, or ends all (None); the frame that the driver sends to tell the ranks."""
        with self._group.lock:
            if offer is None:
                self._ended = True
            else:
                self._offer = offer
        return Message(StreamKind.OFFER)

    def wait_for(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until something is so; False if it is not within the time."""
        with self._changed:
            return self._changed.wait_for(happened, timeout_s)

    def receive(self, connection: int, message: Message) -> Work | None:
        group = self._group
        if message.kind is StreamKind.OFFER:
            require_driver(message)
            group.answer(connection, Message(Kind.OK))
            for asking in list(self._asking):
                self._answer(asking)
            return None
        worker = group.workers.get(message.rank)
        if worker is None or worker.attempt != message.attempt:
            raise ProtocolError(
                f"rank {message.rank} asks for rows and has not met the others",
                expected="HELLO of the same attempt first",
                received=f"a request of attempt {message.attempt}",
            )
        self._listen(message)
        if "taken" in message.meta:
            self._asking[connection] = worker, group.now
            self._answer(connection)
        else:
            group.answer_beside(connection, Message(Kind.OK), worker)
        self._changed.notify_all()
        return None

    def _listen(self, message: Message) -> None:
        rank, meta = message.rank, message.meta
        try:
            if "port" in meta:
                address = str(meta["host"]), int(meta["port"])
                if self.addresses.setdefault(rank, address) != address:
                    self.began_again.add(rank)
            for name in {"taken", "done"} & set(meta):
                self.taken[rank] = int(meta[name])
            if meta.get("left"):
                self.left.add(rank)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                "a malformed request for rows", expected="numbers", received=str(error)
            ) from error

    def disconnect(self, connection: int) -> None:
        self._asking.pop(connection, None)

    def expire(self) -> None:
        now = self._group.now
        for connection, (_, since) in list(self._asking.items()):
            if now - since > LONGEST_WAIT_S:
                self._tell(connection, {})

    def _answer(self, connection: int) -> None:
        rank = self._asking[connection][0].rank
        offer = self._offer
        if offer is not None and offer.number > self.taken[rank]:
            told: Told = {"number": offer.number, "batch_id": offer.batch_id}
            told["rows"] = offer.rows.get(rank, 0)
            told["attempt"] = offer.attempts.get(rank, 0)
            self._tell(connection, told)
        elif self._ended:
            self._tell(connection, {"end": True})

    def _tell(self, connection: int, told: Told) -> None:
        worker, _ = self._asking.pop(connection)
        self._group.answer_beside(connection, Message(Kind.OK, meta=dict(told)), worker)


_MOST_BYTES = 1 << 36
_SEND_BYTES = 8 << 20
"""The bytes of rows that travel together, roughly."""
_TASK_TIMEOUTS = Timeouts(connect_s=10.0, reconnect_s=5.0, reply_s=120.0)


_assembly = partial(Assembly, "rows of a stream", _MOST_BYTES)


@dataclass
class _Sent:
    """The rows of a micro-batch that one attempt to send it has sent."""

    spool: RowSpool
    assembly: Assembly = field(default_factory=_assembly)
    last: int = 0


class StreamIntake(BufferedService):
    """Keeps the rows that are sent to a rank; see :class:`sparkdl.transport.service.Service`.

    What an attempt sends is kept apart: of a task that Spark repeats only the attempt counts that
    the driver names.

    Args:
        memory_budget_bytes: Rows of a micro-batch beyond this go to the rank's disk.
    """

    def __init__(self, memory_budget_bytes: int) -> None:
        super().__init__(FrameLimits(kinds=kinds_of(StreamKind)))
        self._budget = memory_budget_bytes
        self._sent: dict[tuple[int, int], _Sent] = {}
        self._taken = -1
        self._closed = False

    def take(self, number: int, attempt: int) -> Sequence[pa.RecordBatch]:
        """The rows of an offer; those of other attempts and of former offers are dropped."""
        with self.lock:
            sent = self._sent.get((number, attempt))
            self._taken = number
            self._sent = {key: kept for key, kept in self._sent.items() if key[0] > number}
        return [] if sent is None else sent.spool.finish()

    def refuse(self) -> None:
        """Drops what comes from now on: the function takes no more."""
        with self.lock:
            self._closed = True
            self._sent.clear()

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
                expected="a ROWS frame with the number of an offer", received=message.kind.name,
            )  # fmt: skip
        with self.lock:
            if self._closed or number <= self._taken:
                return {"left": True}
            sent = self._sent.setdefault((number, message.attempt), _Sent(RowSpool(self._budget)))
        if message.sequence > sent.last:  # else it came before, and its answer was lost
            if message.total:
                if message.offset == 0:  # one of the same size as before is no repetition of it
                    sent.assembly = _assembly()
                if (whole := sent.assembly.put(message)) is not None:
                    for batch in pa.ipc.open_stream(pa.py_buffer(whole)):
                        sent.spool.add(batch)
            sent.last = message.sequence
        return {"rows": sent.spool.num_rows}


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
    opener = openers_of(endpoint, "socket", limits, _TASK_TIMEOUTS)
    connection = Connection(opener, limits, _TASK_TIMEOUTS, buffered=False, name="a feeding task")
    sequence = 0

    first = Message(StreamKind.ROWS, Flag.NONE, rank=0, attempt=attempt, meta={"number": number})

    def request(message: Message, body: ByteArray | int) -> Message:
        nonlocal sequence
        sequence += 1
        message.sequence = sequence
        return connection.request(message, body)

    try:
        with explained(opener, _TASK_TIMEOUTS):
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
            "a rank has received other rows than were sent to it", expected=f"{rows} rows",
            received=f"{kept.get('rows')}",
        )  # fmt: skip
    return 0 if kept.get("left") else rows


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterable[tuple[int, ByteArray]]:
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


_TIMEOUTS = Timeouts(connect_s=10.0, reconnect_s=10.0, reply_s=60.0)


@dataclass(frozen=True)
class StreamSettings:
    """How the rows of a stream are given.

    Args:
        memory_budget_bytes: Rows of a micro-batch beyond this are kept on the rank's disk.
        stall_timeout_s: How long the function may ask for no rows while it does not wait for any.
        fed: How many ranks get rows, the first ones; None: all.
    """

    shuffle: bool = False
    seed: int = 0
    memory_budget_bytes: int = 1 << 30
    stall_timeout_s: float = 600.0
    fed: int | None = None


class RowsDesk(Closing):
    """A rank's way to the driver about rows, over a connection of its own; for one thread."""

    def __init__(self, endpoint: Endpoint, rank: int, attempt: int) -> None:
        opener = openers_of(endpoint, "auto", FrameLimits(), _TIMEOUTS)
        self._rank, self._attempt = rank, attempt
        self._connection = Connection(
            opener, FrameLimits(), _TIMEOUTS, buffered=False, name=f"the feed of rank {rank}"
        )

    def tell(self, **told: int | str | bool) -> dict[str, int | bool]:
        """Tells something and returns the answer.

        Raises:
            TransportError: The driver is gone.
        """
        message = Message(
            StreamKind.NEXT_ROWS, rank=self._rank, attempt=self._attempt, meta=dict(told)
        )
        return self._connection.request(message).meta

    def close(self) -> None:
        self._connection.close()


class StreamFeed(FunctionFeed):
    """The rows of a rank for as long as the stream runs.

    ``should_stop`` and the methods that give rows wait for the next micro-batch. When one of them
    is called after the last row of a micro-batch, that counts as taken.
    """

    batch_id = -1
    """Spark's number of the micro-batch that the last rows come from; -1 before the first."""
    epoch = 0
    """Micro-batches that were given to their end."""

    def __init__(
        self, settings: StreamSettings, desk: RowsDesk, intake: StreamIntake, rank: int
    ) -> None:
        self._settings, self._desk, self._intake, self._rank = settings, desk, intake, rank
        self._rows: Feed | None = None
        self._taken = -1
        self._waits = self._ended = False

    @property
    def is_due(self) -> bool:
        return not self._waits and not self._ended

    def should_stop(self) -> bool:
        """Whether the stream has ended; waits until it has, or until there are rows."""
        return self._current() is None

    def terminate(self) -> None:
        if not self._ended:
            done = self._rows is None or self._rows.should_stop()
            self._ended, self._rows = True, None
            self._intake.refuse()
            self._desk.tell(left=True, done=self._taken if done else self._taken - 1)

    def next_arrow(self, batch_size: int) -> pa.Table | None:
        require_int("batch_size", batch_size, 1)
        rows = self._current()
        return None if rows is None else rows.next_arrow(batch_size)

    def next_batch(self, batch_size: int) -> Columns:
        require_int("batch_size", batch_size, 1)
        rows = self._current()
        return {} if rows is None else rows.next_batch(batch_size)

    def _current(self) -> Feed | None:
        """The micro-batch that has rows left; waits for it."""
        self.asked_at = time.monotonic()
        while not self._ended:
            if self._rows is not None:
                if not self._rows.should_stop():
                    return self._rows
                self.epoch += 1
                self._rows = None
            self._next()
        return None

    def _next(self) -> None:
        """Says what is taken, and receives what comes next."""
        self._waits = True
        try:
            told = self._desk.tell(taken=self._taken)
        finally:
            self.asked_at, self._waits = time.monotonic(), False
        if told.get("end"):
            self._ended = True
        elif "number" in told:
            number = told["number"]
            chunks = self._intake.take(number, told["attempt"])
            self._taken, self.batch_id = number, told["batch_id"]
            seed = (self._settings.seed * 1009 + self._rank) * 1_000_003 + self.batch_id
            self._rows = Feed(chunks, rows=told["rows"], shuffle=self._settings.shuffle, seed=seed)


@contextlib.contextmanager
def open_stream(
    settings: StreamSettings,
    endpoint: Endpoint,
    rank: tuple[int, int],
    token: str,
    listening: RankListening,
    certificate: Certificate | None,
) -> Iterator[StreamFeed]:
    """The feed of a rank, which listens for rows within.

    Raises:
        ResourceError: No port is free.
        TransportError: The driver is gone.
    """
    bind, host = rank_addresses(listening.bind, towards=listening.towards)
    options = ListenOptions("socket", listening.port, bind, host, web=False)
    intake = StreamIntake(settings.memory_budget_bytes)
    with contextlib.ExitStack() as stack:
        server = Server(intake, token, Listeners.bind(options, None), 1, certificate)
        stack.callback(server.close)
        server.start()
        desk = stack.enter_context(RowsDesk(endpoint, *rank))
        desk.tell(host=server.address.host, port=server.address.port)
        yield StreamFeed(settings, desk, intake, rank[0])
