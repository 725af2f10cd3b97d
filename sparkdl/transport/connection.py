"""A connection that reopens when it breaks: how a request gets through exactly once."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparkdl.errors import AuthenticationError, ProtocolError, TransportError, WaitTimeoutError
from sparkdl.transport.frames import (
    HEADER_BYTES,
    Body,
    ByteArray,
    FrameLimits,
    Kind,
    Message,
    error_from_meta,
)
from sparkdl.wire.greeting import BusyError

BROKEN = (OSError, EOFError)


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


class Channel(Protocol):
    """A client's end of one connection: one request at a time.

    ``raw`` is the buffer that a body is sent from and received into (None on a control channel).
    """

    name: str

    @property
    def raw(self) -> ByteArray | None: ...

    def request(self, message: Message, timeout_s: float | None) -> Message:
        """Sends a frame and returns the reply; a reply's body lies in ``raw``."""
        ...

    def abort(self) -> None:
        """Wakes up a ``request`` that another thread waits in, with an error."""
        ...

    def close(self) -> None: ...


def require_raw(raw: ByteArray | None) -> ByteArray:
    """``raw``, or a ProtocolError on a channel that was opened without a buffer."""
    if raw is None:
        raise ProtocolError(
            "a body came over a control channel", expected="replies without a body",
            received="a body",
        )  # fmt: skip
    return raw


def deliver_body(reply: Message, raw: ByteArray) -> None:
    """Makes ``reply.body`` the start of ``raw``, copied there unless it lies there already."""
    if reply.reading is not None:
        target = raw[: reply.reading.nbytes]
        reply.reading.copy_into(target)
        reply.reading = None
    elif reply.body is not None:
        target = raw[: reply.body.size]
        if target.ctypes.data != reply.body.ctypes.data:
            np.copyto(target, reply.body)
    else:
        return
    reply.body = target


Opener = Callable[[ByteArray | None], Channel]
"""Opens a connection: with a buffer, or (None) for control only."""


class Connection:
    """One channel, reopened with backoff when it breaks. Serializes its requests.

    ``check`` is called before each new try, and raises when none can succeed.

    ``bytes_sent`` and ``bytes_received`` count headers and bodies of the requests that were
    answered; over shm the bodies stay in memory.
    """

    def __init__(
        self,
        opener: Opener,
        limits: FrameLimits,
        timeouts: Timeouts,
        *,
        buffered: bool,
        name: str,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._opener = opener
        self._check = check
        self._timeouts = timeouts
        self._name = name
        self._lock = threading.RLock()
        self._raw = limits.allocate() if buffered else None
        self._uses_raw = False
        self.channel: Channel | None = None
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def raw(self) -> ByteArray:
        if self._raw is None:
            self._require_open()
            raise ProtocolError(
                f"{self._name} has no buffer", expected="a connection that was opened with one",
                received="a connection for control alone",
            )  # fmt: skip
        self._uses_raw = True
        return self._raw

    def _require_open(self) -> None:
        if self.closed:
            raise TransportError(
                f"{self._name} is closed", expected="a use of it before close()",
                received="one after it",
            )  # fmt: skip

    def request(
        self, message: Message, body: int | ByteArray = 0, *, deferred: bool = False
    ) -> Message:
        """Sends a frame, again after a broken connection, and returns the reply.

        Args:
            body: The length from the start of ``raw``, or the bytes themselves, which are put
                there anew for each try (a blob is sent from where it lies).
            deferred: Whether the server may take its time.

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
                self._require_open()
                tries += 1
                try:
                    channel = self._open()
                    message.body = self._body(message, body)
                    reply = channel.request(message, limit_s)
                    self.bytes_sent += HEADER_BYTES + message.body_bytes
                    self.bytes_received += HEADER_BYTES + reply.body_bytes
                    break
                except AuthenticationError as raised:
                    self._drop()
                    refusals += 1
                    if refusals > 1:  # a server that goes down closes just as well
                        raise
                    error: Exception = raised
                except (ProtocolError, KeyboardInterrupt):
                    self._drop()  # out of step: the reply may still come
                    raise
                except TimeoutError as raised:
                    unreachable = self.channel is None or raised.errno == errno.ETIMEDOUT
                    self._drop()
                    if not unreachable:
                        raise WaitTimeoutError(
                            f"{self._name} got no answer to {message.kind.name}",
                            expected=f"within {limit_s:g} s", received="silence",
                            hint="is the driver's host overloaded?",
                        ) from raised  # fmt: skip
                    error = raised
                except BROKEN as raised:
                    self._drop()
                    error = raised
                if self._check is not None:
                    self._check()
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

    def _body(self, message: Message, body: int | ByteArray) -> ByteArray | None:
        if isinstance(body, int):
            return self.raw[:body] if body else None
        if message.kind.body is Body.CHUNK:  # ``raw`` may hold weights that another thread reads
            return body
        target = self.raw[: body.size]
        np.copyto(target, body)
        return target

    def _open(self) -> Channel:
        if self.channel is None:
            channel = self._opener(self._raw)
            if channel.raw is not None and channel.raw is not self._raw:
                if self._uses_raw and self._raw is not None and self._raw.size == channel.raw.size:
                    np.copyto(channel.raw, self._raw)  # what was to be sent goes on
                self._raw = channel.raw
            self.channel = channel
        return self.channel

    def open(self) -> None:
        """Opens the channel; where the server is busy or resets it, again for ``connect_s``.

        A server that has no room may be gone before it is heard. One that refuses connections is
        not there, and is not tried again.
        """
        deadline = time.monotonic() + self._timeouts.connect_s
        delay_s = 0.05
        with self._lock:
            while True:
                try:
                    self._open()
                    return
                except (BusyError, BrokenPipeError, ConnectionResetError):
                    if time.monotonic() >= deadline:
                        raise
                time.sleep(delay_s * (0.5 + random.random()))
                delay_s = min(2 * delay_s, 1.0)

    def _drop(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def abort(self) -> None:
        """Wakes up a request that waits, from another thread."""
        if (channel := self.channel) is not None:
            channel.abort()

    def give_up(self) -> None:
        """Ends a request of another thread for good: it is not tried again."""
        self.closed = True
        self.abort()

    def close(self, last: Message | None = None) -> None:
        """Closes for good; sends ``last`` first if no request is under way."""
        if last is not None and self._lock.acquire(timeout=0.2):
            try:
                if self.channel is not None:
                    with contextlib.suppress(Exception):
                        self.channel.request(last, 2.0)
            finally:
                self._lock.release()
        self.closed = True
        self.abort()
        with self._lock:
            self._drop()
            self._raw = None  # 16 MiB of shared memory, which a run's objects hold in a circle
