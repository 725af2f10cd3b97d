"""A worker's, and the driver's, end of the parameter server.

    client = connect(address, token, mode='auto', rank=0, attempt=0, layout=layout)
    welcome = client.hello(batches_per_epoch=100)
    client.pull()                       # client.buffer holds the center
    client.buffer[...] = delta
    client.push_pull(Progress(epoch=0, batch=8, batches=8, rows=512))

Every commit carries a sequence number; after a broken connection it is sent again under the same
number, so it counts exactly once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from sparkdl.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    TransportError,
    UnknownNameError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.ps.messages import ByteArray, Flag, Kind, Limits, Message, error_from_meta
from sparkdl.ps.transports.address import Address, boot_id
from sparkdl.ps.transports.base import Channel
from sparkdl.ps.transports.shm import ShmChannel
from sparkdl.ps.transports.socket import SocketChannel
from sparkdl.weights import FloatArray, Layout

_BROKEN = (OSError, EOFError)


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a client waits.

    Args:
        connect_s: For one connection attempt, and its first frame.
        reconnect_s: How long a broken connection is tried again before TransportError.
        reply_s: For a reply that the server does not defer, e.g. a pull or a heartbeat.
        heartbeat_s: Between two heartbeats; None for a third of the server's lease.
    """

    connect_s: float = 10.0
    reconnect_s: float = 10.0
    reply_s: float = 120.0
    heartbeat_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """What a commit says beside its payload.

    Args:
        epoch: Epoch the worker is in, from 0.
        batch: Batches of that epoch done, those of this commit included.
        batches: Batches in this commit.
        rows: Rows in this commit: its weight where rows are averaged; 0 contributes nothing.
        learning_rate: The worker's now, for rules that ask for it.
        meta: Telemetry: ``{"epoch", "metrics": [floats], "rows", ...}``.
    """

    epoch: int
    batch: int
    batches: int
    rows: int
    learning_rate: float = math.nan
    meta: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Welcome:
    """The answer to HELLO: where this rank goes on.

    Args:
        done: This rank's work was finished by another attempt; there is nothing to do.
        epoch: Epoch to continue in.
        batch: Batches of that epoch that are committed already.
        source: Where the weights come from: ``'center'`` (pull), ``'state'`` (get_state: a live
            rank's weights and optimizer), ``'snapshot'`` (pull: the last snapshot).
        steps_per_epoch: Most batches per epoch of any rank; agreed among all in blocking rules.
        num_workers: Workers of the run.
        clock: Commits or rounds applied so far.
        worker_clock: Commits of this rank so far.
        rows: Rows this rank has committed so far.
        lease_s: Silence after which the server gives this worker up.
    """

    done: bool
    epoch: int
    batch: int
    source: str
    steps_per_epoch: int
    num_workers: int
    clock: int
    worker_clock: int
    rows: int
    lease_s: float


class Opener(Protocol):
    """Opens a connection: with a buffer, or (``raw`` None) for control only."""

    def __call__(self, raw: ByteArray | None, like: Channel | None) -> Channel: ...


class _Link:
    """One channel, reopened with backoff when it breaks. Serializes its requests."""

    def __init__(
        self, opener: Opener, limits: Limits, timeouts: Timeouts, *, buffered: bool, name: str
    ) -> None:
        self._opener = opener
        self._timeouts = timeouts
        self._name = name
        self._lock = threading.RLock()
        self._raw = limits.allocate() if buffered else None
        self.channel: Channel | None = None
        self.like: Channel | None = None
        self.closed = False

    @property
    def raw(self) -> ByteArray:
        channel_raw = None if self.channel is None else self.channel.raw
        raw = self._raw if channel_raw is None else channel_raw
        if raw is None:
            raise ProtocolError("this connection has no buffer")
        return raw

    def request(self, message: Message, body_bytes: int = 0, *, deferred: bool = False) -> Message:
        """Sends a frame, again after a broken connection, and returns the reply.

        Raises:
            TransportError: The server stayed unreachable for ``reconnect_s``.
            SparkDLError: Whatever the server answered with.
        """
        with self._lock:
            limit_s = None if deferred else self._timeouts.reply_s
            deadline: float | None = None
            delay_s = 0.05
            tries = refusals = 0
            while True:
                if self.closed:
                    raise TransportError(f"{self._name} is closed")
                tries += 1
                try:
                    channel = self._open()
                    message.body = self.raw[:body_bytes] if body_bytes else None
                    reply = channel.request(message, limit_s)
                    break
                except AuthenticationError as raised:
                    self._drop()
                    refusals += 1
                    if refusals > 1:  # a server that goes down closes just as well
                        raise
                    error: Exception = raised
                except ProtocolError:
                    self._drop()  # out of step
                    raise
                except TimeoutError as raised:
                    unreachable = self.channel is None or raised.errno == errno.ETIMEDOUT
                    self._drop()
                    if not unreachable:
                        raise WaitTimeoutError(
                            f"{self._name} got no answer to {message.kind.name}",
                            expected=f"within {limit_s:g} s",
                            received="silence",
                            hint="is the driver's host overloaded?",
                        ) from raised
                    error = raised
                except _BROKEN as raised:
                    self._drop()
                    error = raised
                now = time.monotonic()
                deadline = deadline or now + self._timeouts.reconnect_s
                if now >= deadline or self.closed:
                    raise TransportError(
                        f"{self._name} lost the parameter server",
                        expected=f"an answer to {message.kind.name}",
                        received=f"{type(error).__name__}: {error}; {tries} tries over "
                        f"{self._timeouts.reconnect_s:g} s",
                        hint="is the driver alive, and reachable from this host?",
                    ) from error
                time.sleep(min(delay_s * (0.5 + random.random()), max(deadline - now, 0.0)))
                delay_s = min(2 * delay_s, 1.0)
            if reply.kind is Kind.ERROR:
                raise error_from_meta(reply.meta)
            return reply

    def _open(self) -> Channel:
        if self.channel is None:
            channel = self._opener(self._raw, self.like)
            if channel.raw is not None and channel.raw is not self._raw:
                if self._raw is not None and self._raw.size == channel.raw.size:
                    np.copyto(channel.raw, self._raw)  # what was to be sent goes on
                self._raw = channel.raw
            self.channel = channel
        return self.channel

    def open(self) -> None:
        with self._lock:
            self._open()

    def _drop(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def abort(self) -> None:
        """Wakes up a request that waits, from another thread."""
        channel = self.channel
        if channel is not None:
            channel.abort()

    def reset(self, like: Channel | None) -> None:
        """Opens anew at the next request, as a companion of ``like``."""
        with self._lock:
            self._drop()
            self.like = like

    def close(self, farewell: Message | None = None) -> None:
        """Closes for good; says ``farewell`` first if no request is under way."""
        if farewell is not None and self._lock.acquire(timeout=0.2):
            try:
                if self.channel is not None:
                    with contextlib.suppress(Exception):
                        self.channel.request(farewell, 2.0)
            finally:
                self._lock.release()
        self.closed = True
        self.abort()
        with self._lock:
            self._drop()


class Client:
    """One worker's connection. Made by :func:`connect`. Thread-safe, one request at a time.

    ``buffer`` is the layout's size: a push sends what it holds, a pull replaces what it holds.
    With shm it is the mailbox itself; it changes identity after a reconnect, so ask for it each
    time instead of keeping it.
    """

    def __init__(
        self,
        opener: Opener,
        limits: Limits,
        *,
        rank: int,
        attempt: int,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self.welcome: Welcome | None = None
        self.stopped = False
        self.aborted = False
        self.learning_rate: float | None = None
        self.clock = 0
        self.lead = False
        self.upload_requested = False
        self.round_rows = 0
        self._limits = limits
        self._timeouts = timeouts or Timeouts()
        self._opener = opener
        self._sequence = 0
        self._link = _Link(opener, limits, self._timeouts, buffered=True, name=f"worker {rank}")
        self._link.open()
        self._pulse: threading.Thread | None = None
        self._ended = threading.Event()

    # ---------------------------------------------------------------- properties

    @property
    def transport(self) -> str:
        """Name of the transport in use: ``'shm'``, ``'socket'``, ``'http'`` or ``'inproc'``."""
        channel = self._link.channel
        return "none" if channel is None else channel.name

    @property
    def buffer(self) -> FloatArray:
        """The float32 buffer that pushes send and pulls fill."""
        return self._limits.weights(self._link.raw)

    # ---------------------------------------------------------------- joining and leaving

    def hello(self, *, rows: int = 0, batches_per_epoch: int = 0, **info: Any) -> Welcome:
        """Joins. Waits for all workers in blocking rules, and for a live attempt of this rank.

        Args:
            rows: Rows in this worker's partition.
            batches_per_epoch: Batches it makes of them.
            **info: More to show in the server's status (JSON-able).
        """
        self._start_heartbeat(self._timeouts.heartbeat_s or 1.0)
        meta = {
            "weights_bytes": self._limits.weights_bytes,
            "rows": rows,
            "batches_per_epoch": batches_per_epoch,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **info,
        }
        reply = self._request(Message(Kind.HELLO, meta=meta), deferred=True)
        known = reply.meta
        self._sequence = reply.sequence
        self.welcome = Welcome(
            done=bool(reply.flags & Flag.DONE),
            epoch=reply.epoch,
            batch=reply.batch,
            source=str(known["source"]),
            steps_per_epoch=int(known["steps_per_epoch"]),
            num_workers=int(known["num_workers"]),
            clock=reply.clock,
            worker_clock=int(known["worker_clock"]),
            rows=reply.rows,
            lease_s=float(known["lease_s"]),
        )
        if self._timeouts.heartbeat_s is None:
            self._period_s = min(self.welcome.lease_s / 3, 10.0)
        return self.welcome

    def finish(self) -> None:
        """Says that this rank's work is done, whatever happens to its process from now on."""
        self._request(Message(Kind.FINISH))

    def fail(self, error: str, traceback: str = "") -> None:
        """Says that this rank failed for good: every other rank's next request raises."""
        meta = {"error": error[:10_000], "traceback": traceback[-100_000:]}
        self._request(Message(Kind.FAIL, meta=meta))

    def close(self) -> None:
        """Closes the connection and ends the heartbeat; a rank that did not finish is dead."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._link.close(self._signed(Message(Kind.BYE)))
        if self._pulse is not None and self._pulse is not threading.current_thread():
            self._pulse.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- the verbs

    def pull(self) -> FloatArray:
        """Fills ``buffer`` with the center, and returns it."""
        self._request(Message(Kind.PULL))
        return self.buffer

    def push(self, progress: Progress) -> None:
        """Commits what ``buffer`` holds; its content is undefined afterwards."""
        self._commit(Kind.PUSH, progress)

    def push_pull(self, progress: Progress) -> FloatArray:
        """Commits what ``buffer`` holds, and fills it with what the server answers.

        That is the center, or, for a blocking rule on gradients, the mean gradient of the round;
        ``round_rows`` are then the rows of all ranks (0: nothing to apply).
        """
        self._commit(Kind.PUSH_PULL, progress)
        return self.buffer

    def report(self, meta: Mapping[str, Any], *, wait: bool = False) -> None:
        """Sends telemetry; with ``wait``, returns when the driver releases ``meta['epoch']``."""
        flags = Flag.WAIT if wait else Flag.NONE
        self._request(Message(Kind.REPORT, flags=flags, meta=dict(meta)), deferred=wait)

    def snapshot(self, epoch: int, batch: int = 0) -> None:
        """Stores ``buffer`` (weights) as the center; for blocking rules on gradients."""
        self._request(Message(Kind.SNAPSHOT, epoch=epoch, batch=batch), self._limits.weights_bytes)

    def put_state(self, state: bytes, epoch: int, batch: int) -> None:
        """Uploads weights and optimizer state for a joiner. Overwrites ``buffer``."""
        source = np.frombuffer(state, np.uint8)
        for offset in range(0, source.size, self._limits.buffer_bytes):
            chunk = source[offset : offset + self._limits.buffer_bytes]
            self._link.raw[: chunk.size] = chunk
            meta = {"offset": offset, "total": source.size}
            self._request(Message(Kind.STATE_PUT, epoch=epoch, batch=batch, meta=meta), chunk.size)
        self.upload_requested = False

    def get_state(self) -> bytes:
        """What a live rank put for this joiner. Overwrites ``buffer``."""
        state = bytearray()
        total = 1
        while len(state) < total:
            reply = self._request(Message(Kind.STATE_GET, meta={"offset": len(state)}))
            if reply.body is None or not reply.body.size:
                raise ProtocolError("the server sent an empty chunk of state")
            total = int(reply.meta["total"])
            state += reply.body.data
        return bytes(state)

    # ---------------------------------------------------------------- inside

    def _commit(self, kind: Kind, progress: Progress) -> None:
        self._sequence += 1
        message = Message(
            kind,
            sequence=self._sequence,
            epoch=progress.epoch,
            batch=progress.batch,
            batches=progress.batches,
            rows=progress.rows,
            learning_rate=progress.learning_rate,
            meta=dict(progress.meta or {}),
        )
        reply = self._request(message, self._limits.weights_bytes, deferred=True)
        self.round_rows = reply.rows
        self.upload_requested = bool(reply.flags & Flag.UPLOAD)

    def _signed(self, message: Message) -> Message:
        message.rank, message.attempt = self.rank, self.attempt
        return message

    def _request(self, message: Message, body_bytes: int = 0, *, deferred: bool = False) -> Message:
        try:
            reply = self._link.request(self._signed(message), body_bytes, deferred=deferred)
        except WorkerError:
            self.aborted = True
            raise
        self._note(reply)
        return reply

    def _note(self, reply: Message) -> None:
        self.clock = reply.clock
        self.stopped = bool(reply.flags & Flag.STOP)
        self.aborted = bool(reply.flags & Flag.ABORT)
        self.lead = bool(reply.flags & Flag.LEAD)
        self.learning_rate = None if math.isnan(reply.learning_rate) else reply.learning_rate

    def _start_heartbeat(self, period_s: float) -> None:
        self._period_s = period_s
        if self._pulse is None:
            self._pulse = threading.Thread(
                target=self._beat, name=f"sparkdl-ps-heartbeat-{self.rank}", daemon=True
            )
            self._pulse.start()

    def _beat(self) -> None:
        """Keeps the lease; a server that stays silent wakes up a request that waits for it."""
        timeouts = Timeouts(connect_s=self._timeouts.connect_s, reconnect_s=0.0, reply_s=30.0)
        link = _Link(self._opener, self._limits, timeouts, buffered=False, name="a heartbeat")
        heard = time.monotonic()
        while not self._ended.wait(self._period_s):
            try:
                if link.like is not self._link.channel:
                    link.reset(self._link.channel)
                link.request(self._signed(Message(Kind.HEARTBEAT)))
                heard = time.monotonic()
            except Exception:
                if time.monotonic() - heard > 3 * self._period_s + self._timeouts.reconnect_s:
                    self._link.abort()
        link.close()


class DriverClient:
    """The driver's connection: telemetry in, control out, the center at the end.

    Args:
        address: Of the server; None with ``opener``.
        token: The run's secret.
        layout: Of the flat buffer.
        mode: As in :func:`connect`.
        timeouts: How long to wait.
        opener: Opens connections instead of ``address`` (in-process servers).

    Raises:
        TransportError: No way leads to the server; says what was tried.
        AuthenticationError: The server refused the token.
    """

    def __init__(
        self,
        address: Address | None,
        token: str,
        layout: Layout,
        *,
        mode: str = "auto",
        timeouts: Timeouts | None = None,
        opener: Opener | None = None,
    ) -> None:
        t = timeouts or Timeouts()
        self._limits = Limits.of(layout)
        if opener is None:
            if address is None:
                raise ConfigError("a driver's client needs an address or an opener")
            opener = _openers(address, token, mode, self._limits, t)
        self._link = _Link(opener, self._limits, t, buffered=True, name="the driver")
        with _explained(opener, t):
            self._link.open()

    def status(self, since_epoch: int = 0) -> dict[str, Any]:
        """Workers, epochs (telemetry), failure, clock and counters, as one JSON object."""
        return self._link.request(Message(Kind.STATUS, meta={"since_epoch": since_epoch})).meta

    def pull(self, out: FloatArray | None = None) -> FloatArray:
        """A copy of the center (for gradient rules: of the last snapshot)."""
        self._link.request(Message(Kind.PULL))
        result = np.empty(self._limits.weights_bytes // 4, np.float32) if out is None else out
        np.copyto(result, self._limits.weights(self._link.raw))
        return result

    def control(
        self,
        *,
        stop: bool = False,
        learning_rate: float | None = None,
        release: int | None = None,
    ) -> None:
        """Asks all workers to stop, sets their learning rate, or lets them pass an epoch's end.

        All three take effect together: in blocking rules at one step for all ranks.
        """
        meta: dict[str, Any] = {}
        if stop:
            meta["stop"] = True
        if learning_rate is not None:
            meta["learning_rate"] = float(learning_rate)
        if release is not None:
            meta["release"] = int(release)
        self._link.request(Message(Kind.CONTROL, meta=meta))

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class _Openers:
    """Ways to reach one address, in the order that the mode tries them."""

    address: Address
    token: str
    limits: Limits
    timeout_s: float
    modes: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)

    def __call__(self, raw: ByteArray | None, like: Channel | None) -> Channel:
        last: OSError | EOFError | None = None
        for mode in self.modes:
            try:
                channel = self._open(mode, raw, like)
            except AuthenticationError:
                raise
            except _BROKEN as error:
                self.failures[mode] = str(error)
                last = error
                continue
            if raw is not None or like is None:
                self.modes = (mode,)  # stay with what works
            return channel
        raise last or ConnectionRefusedError("no transport to try")

    def _open(self, mode: str, raw: ByteArray | None, like: Channel | None) -> Channel:
        address, token, limits = self.address, self.token, self.limits
        if mode == "shm":
            return ShmChannel(address.uds, token, limits, raw is not None, self.timeout_s)
        if mode == "socket":
            return SocketChannel(address.host, address.port, token, limits, raw, self.timeout_s)
        from sparkdl.ps.transports.http import HttpChannel

        client = like.client if isinstance(like, HttpChannel) else None
        return HttpChannel(address.http, token, limits, raw, self.timeout_s, client)


def _openers(address: Address, token: str, mode: str, limits: Limits, t: Timeouts) -> _Openers:
    usable = {
        "shm": bool(address.uds) and address.boot_id == boot_id(),
        "socket": bool(address.port),
        "http": bool(address.http),
    }
    if mode != "auto" and mode not in usable:
        raise UnknownNameError("parameter_server_mode", mode, ("auto", *usable))
    modes = tuple(m for m, ok in usable.items() if ok and mode in ("auto", m))
    if mode == "auto" and address.mode != "auto":
        modes = tuple(m for m in modes if m == address.mode)
    if not modes:
        raise TransportError(
            f"the parameter server cannot be reached by mode {mode!r} from here",
            expected="shm: a worker on the server's host; socket, http: a server that has them",
            received=str(address),
            hint="mode='auto' takes what works",
        )
    return _Openers(address, token, limits, t.connect_s, modes)


def connect(
    address: Address,
    token: str,
    mode: str = "auto",
    *,
    rank: int,
    attempt: int = 0,
    layout: Layout,
    timeouts: Timeouts | None = None,
) -> Client:
    """Connects a worker; ``mode='auto'`` tries shm (same host), then socket, then http.

    Args:
        address: Of the server.
        token: The run's secret.
        mode: ``'auto'``, ``'shm'``, ``'socket'`` or ``'http'``.
        rank: The worker's rank.
        attempt: A number that no other attempt of this rank has.
        layout: Of the flat buffer; the server refuses another size.
        timeouts: How long to wait.

    Raises:
        TransportError: No way leads to the server; says what was tried.
        AuthenticationError: The server refused the token.
    """
    t = timeouts or Timeouts()
    limits = Limits.of(layout)
    openers = _openers(address, token, mode, limits, t)
    with _explained(openers, t):
        return Client(openers, limits, rank=rank, attempt=attempt, timeouts=t)


@contextlib.contextmanager
def _explained(opener: Opener, timeouts: Timeouts) -> Iterator[None]:
    try:
        yield
    except AuthenticationError:
        raise
    except _BROKEN as error:
        tried = opener.failures if isinstance(opener, _Openers) else {"": str(error)}
        raise TransportError(
            "the parameter server cannot be reached",
            expected=f"an open connection within {timeouts.connect_s:g} s",
            received="; ".join(f"{mode}: {text}" for mode, text in tried.items()),
            hint="is the driver's address reachable from the executors? "
            "advertised_address and port ranges help behind NAT and firewalls",
        ) from error
