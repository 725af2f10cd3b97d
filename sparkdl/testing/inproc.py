"""Servers without sockets, and ranks as threads: for tests. Frames are encoded all the same."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkdl.collective.arithmetic import (
    Array,
    reduce_in_order,
    reduction_factors,
    reduction_ufunc,
    shard_edges,
)
from sparkdl.collective.communicator import Communicator, name_ranks
from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.coordinator.session import Session
from sparkdl.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    TransportError,
    WaitTimeoutError,
)
from sparkdl.process.closing import Closing
from sparkdl.ps.client import Client
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig
from sparkdl.transport.connection import Opener, Timeouts, deliver_body
from sparkdl.transport.frames import (
    HEADER_BYTES,
    ByteArray,
    FrameLimits,
    Message,
    decode_header,
    decode_meta,
    encode,
)
from sparkdl.transport.service import Dispatcher, Service
from sparkdl.weights import FloatArray, Layout
from sparkdl.wire.listening import token_matches

TOKEN = "in this process"


class InprocChannel:
    """A client's end of a connection to a dispatcher in this process.

    The client's buffer is the server's buffer of this connection, so nothing is copied twice.
    """

    name = "inproc"

    def __init__(self, dispatcher: Dispatcher, limits: FrameLimits, raw: ByteArray | None) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self.raw = raw
        self._aborted = threading.Event()
        self._number = dispatcher.open()
        if raw is not None:
            dispatcher.service.attach(self._number, raw)

    def request(self, message: Message, timeout_s: float | None) -> Message:
        received = _carried(message, self._dispatcher.limits)
        if self._aborted.is_set():
            raise ConnectionResetError("the connection was aborted")
        reply = self._dispatcher.call(self._number, received, lambda: not self._aborted.is_set())
        if reply is None:
            raise ConnectionResetError("the server ended")
        reply = _carried(reply, self._limits)
        if reply.body_bytes and self.raw is not None:
            deliver_body(reply, self.raw)
        return reply

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._aborted.set()
        self._dispatcher.close(self._number)


def _carried(message: Message, limits: FrameLimits) -> Message:
    """The message that a receiver gets: encoded and decoded again; its body stays in place."""
    frame = encode(message, max_meta_bytes=limits.max_meta_bytes)
    received, meta_size, body_size = decode_header(frame[:HEADER_BYTES], limits.kinds)
    limits.check(received, meta_size, body_size)
    received.meta = decode_meta(received.kind, frame[HEADER_BYTES:])
    received.body, received.reading = message.body, message.reading
    return received


class InprocServer(Closing):
    """A service with a dispatcher and no listening socket."""

    def __init__(self, service: Service, token: str = TOKEN) -> None:
        self._token = token
        self.dispatcher = Dispatcher(service)

    def opener(self, token: str | None = None) -> Opener:
        """Opens connections with ``token``; None for the right one.

        Raises (the opener):
            AuthenticationError: The token is another one.
        """
        shown = self._token if token is None else token

        def open_channel(raw: ByteArray | None) -> InprocChannel:
            if not token_matches(shown, self._token):
                raise AuthenticationError(
                    "a wrong token", expected="the token of this run", received="another one"
                )
            return InprocChannel(self.dispatcher, self.dispatcher.limits, raw)

        return open_channel

    def session(self, rank: int, attempt: int = 0, timeouts: Timeouts | None = None) -> Session:
        limits = self.dispatcher.limits
        return Session(self.opener(), limits, rank=rank, attempt=attempt, timeouts=timeouts)

    def driver(self) -> DriverClient:
        return DriverClient(self.opener(), self.dispatcher.limits)

    def close(self) -> None:
        self.dispatcher.shutdown()


class InprocParameterServer(InprocServer):
    """A coordinator with a parameter store, without a process and without sockets.

    Args:
        center: Initial weights; taken over, not copied.
    """

    def __init__(self, config: ServerConfig, center: FloatArray) -> None:
        self.config, self.center = config, center
        self.coordinator = config.coordinator(center)
        super().__init__(self.coordinator, config.token)

    def client(
        self,
        rank: int = 0,
        attempt: int = 0,
        *,
        token: str | None = None,
        layout: Layout | None = None,
        timeouts: Timeouts | None = None,
    ) -> Client:
        """A worker's client, with the configuration's compression."""
        compression = self.config.compression()
        limits = limits_of(self.config.layout if layout is None else layout, compression)
        session = Session(self.opener(token), limits, rank=rank, attempt=attempt, timeouts=timeouts)
        return Client(session, compression)


class _Table:
    """The contributions of the ranks of one world, and which ranks have closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, Any]] = {}
        self.closed: set[int] = set()
        self.threads: dict[int, int] = {}
        self.groups: dict[tuple[tuple[int, ...], int], _Table] = {}

    def group(self, ranks: tuple[int, ...], count: int) -> _Table:
        with self.changed:
            return self.groups.setdefault((ranks, count), _Table(len(ranks)))


class ThreadCommunicator(Communicator):
    """One thread's rank; made by :func:`connect_threads`."""

    name = "threads"

    def __init__(self, rank: int, table: _Table, timeout_s: float) -> None:
        super().__init__(
            rank, table.size, local_rank=rank, local_size=table.size, timeout_s=timeout_s
        )
        self._table = table
        self._round = 0
        self._made: dict[tuple[int, ...], int] = {}

    def _shared(
        self, label: tuple[Any, ...], item: object, read: Callable[[list[Any]], list[Array]]
    ) -> list[Array]:
        """See ``_meet``; no rank goes on, and overwrites its own, while others still read."""
        result = self._meet(label, item, read)
        self._meet(("read",), None, lambda _: [])
        return result

    def _meet(
        self, label: tuple[Any, ...], item: object, read: Callable[[list[Any]], list[Array]]
    ) -> list[Array]:
        """Contributes ``item`` to this rank's next round, waits for all ranks, and reads theirs."""
        number, self._round = self._round, self._round + 1
        table = self._table
        with table.changed:
            table.rounds.setdefault(number, {})[self.rank] = (label, item)
            table.threads[self.rank] = threading.get_ident()
            table.changed.notify_all()
        self._wait(lambda: set(range(table.size)) - set(table.rounds[number]))
        contributed = [table.rounds[number][r] for r in range(table.size)]
        for rank, (other, _) in enumerate(contributed):
            if other != label:
                raise ProtocolError(
                    f"the ranks disagree about the operation on rank {self.rank}",
                    expected=f"{label} on all ranks", received=f"{other} on rank {rank}",
                )  # fmt: skip
        result = read([entry for _, entry in contributed])
        with table.changed:
            table.rounds.pop(number - 1, None)  # every rank of this round has read the one before
        return result

    def _wait(self, absent: Callable[[], set[int]]) -> None:
        deadline = time.monotonic() + self._timeout_s
        table = self._table
        with table.changed:
            while missing := absent():
                if closed := missing & table.closed:
                    raise TransportError(
                        f"{name_ranks(sorted(closed))} closed the threads communicator",
                        expected="all ranks to call the operation",
                        received=f"rank {self.rank} waits for them",
                    )
                rest = deadline - time.monotonic()
                if rest <= 0:
                    frames, absent_ranks = sys._current_frames(), name_ranks(sorted(missing))
                    found = [frames.get(table.threads.get(r, 0)) for r in sorted(missing)]
                    raise WaitTimeoutError(
                        f"rank {self.rank} has waited too long; missing {absent_ranks}",
                        expected=f"all ranks within {self._timeout_s:g} s",
                        received=f"nothing from {absent_ranks}",
                        hint="\n".join("".join(traceback.format_stack(f)) for f in found if f),
                    )  # fmt: skip
                self._absent = missing
                table.changed.wait(rest)
            self._absent = set()

    _absent: set[int] = set()  # noqa: RUF012  (replaced, never changed)

    def _missing(self) -> list[int]:
        return sorted(self._absent)

    def _all_reduce(self, source: Array, target: Array, op: str, weight: float) -> None:
        def read(entries: list[tuple[Array, float]]) -> list[Array]:
            factors, result = reduction_factors(op, [w for _, w in entries]), np.empty_like(target)
            reduce_in_order([a for a, _ in entries], factors, reduction_ufunc(op), result)
            return [result]

        label = ("all_reduce", op, source.dtype.name, source.size)
        np.copyto(target, self._shared(label, (source, weight), read)[0])

    def _reduce_scatter(self, source: Array, target: Array, op: str, weight: float) -> None:
        whole = np.empty_like(source)
        self._all_reduce(source, whole, op, weight)
        edges = shard_edges(source.size, self.size)
        np.copyto(target, whole[edges[self.rank] : edges[self.rank + 1]])

    def _all_gather(self, source: Array) -> list[Array]:
        return self._shared(("all_gather",), source, lambda entries: [np.array(a) for a in entries])

    def _all_to_all(self, parts: list[Array]) -> list[Array]:
        label = ("all_to_all", parts[0].dtype.name)
        return self._shared(label, parts, lambda entries: [np.array(e[self.rank]) for e in entries])

    def _broadcast(self, target: Array, root: int) -> None:
        label = ("broadcast", root, target.dtype.name, target.size)
        np.copyto(target, self._shared(label, target, lambda entries: [entries[root].copy()])[0])

    def _barrier(self) -> None:
        self._meet(("barrier",), None, lambda _: [])

    def _group(self, ranks: list[int]) -> Communicator:
        key = tuple(ranks)
        count = self._made[key] = self._made.get(key, 0) + 1
        table = self._table.group(key, count)
        return ThreadCommunicator(ranks.index(self.rank), table, self._timeout_s)

    def _abort(self) -> None:
        with self._table.changed:
            self._table.closed.add(self.rank)
            self._table.changed.notify_all()

    def _release(self) -> None:
        self._abort()


def connect_threads(size: int, *, timeout_s: float = 120.0) -> list[ThreadCommunicator]:
    """The communicators of ``size`` ranks; use each from a thread of its own.

    Raises:
        ConfigError: ``size`` is not positive.
    """
    if size < 1:
        raise ConfigError(
            "cannot connect threads", expected="a size of at least 1", received=f"size={size!r}"
        )
    table = _Table(size)
    return [ThreadCommunicator(rank, table, timeout_s) for rank in range(size)]
