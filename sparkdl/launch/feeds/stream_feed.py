"""``StreamFeed``: the rows of a rank where they have no end, micro-batch after micro-batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from sparkdl.data.feed import Columns, Feed
from sparkdl.launch.feeds.feeding import FunctionFeed
from sparkdl.launch.feeds.stream_intake import StreamIntake
from sparkdl.launch.feeds.stream_store import StreamKind
from sparkdl.process.closing import Closing
from sparkdl.settings.network import RankListening
from sparkdl.settings.values import require_int
from sparkdl.transport.address import Endpoint, Listeners, ListenOptions
from sparkdl.transport.connection import Connection, Timeouts
from sparkdl.transport.frames import FrameLimits, Message
from sparkdl.transport.openers import openers_of
from sparkdl.transport.server import Server
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.tls import Certificate

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


class Desk(Protocol):
    """A rank's way to the driver about rows."""

    def tell(self, **told: int | str | bool) -> dict[str, int | bool]:
        """Tells something and returns the answer."""


class RowsDesk(Closing):
    """A :class:`Desk` over a connection of its own; for one thread."""

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
        self, settings: StreamSettings, desk: Desk, intake: StreamIntake, rank: int
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
