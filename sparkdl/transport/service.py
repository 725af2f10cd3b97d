"""A service (message in, replies out, no sockets, no clock), and the threads that carry to it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import HEADER_BYTES, ByteArray, FrameKind, FrameLimits, Kind, Message

Replies = list[tuple[int, Message]]
"""Connection and reply, for each reply that is due."""


class Metric(NamedTuple):
    """One number for ``/metrics``, in Prometheus' terms."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float


class Service(Protocol):
    """A state machine behind transports. A *connection* is an int that a transport chose.

    Each connection has one outstanding request at a time and one buffer. Every request gets
    exactly one reply, at once or deferred: ``receive``, ``disconnect`` and ``tick`` return the
    replies that became due. All methods are thread-safe.
    """

    beside: frozenset[FrameKind]
    """Requests that are never deferred, and may overtake one that waits."""
    parting: frozenset[FrameKind]
    """Requests after which a client that has no connection is forgotten."""
    bytes_in: int
    bytes_out: int

    @property
    def limits(self) -> FrameLimits:
        """The largest bodies that a peer may send."""

    @property
    def idle_s(self) -> float:
        """Seconds of silence after which a client without a connection is forgotten."""

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        """Takes one request."""

    def disconnect(self, connection: int, now: float) -> Replies:
        """The connection is gone."""

    def tick(self, now: float) -> Replies:
        """Ends the waits that ran out; to be called a few times per second."""

    def buffer(self, connection: int) -> ByteArray:
        """This connection's buffer, allocated at the first call."""

    def attach(self, connection: int, buffer: ByteArray) -> None:
        """Makes ``buffer`` (a shared-memory mailbox) this connection's."""

    def metrics(self) -> list[Metric]:
        """Numbers for ``/metrics``."""


class Buffers:
    """A buffer for each connection, as a :class:`Service` has them."""

    def __init__(self, limits: FrameLimits) -> None:
        self.limits = limits
        self.lock = threading.RLock()
        self._buffers: dict[int, ByteArray] = {}

    def buffer(self, connection: int) -> ByteArray:
        with self.lock:
            if connection not in self._buffers:
                self._buffers[connection] = self.limits.allocate()
            return self._buffers[connection]

    def attach(self, connection: int, buffer: ByteArray) -> None:
        with self.lock:
            self._buffers[connection] = buffer


class BufferedService(Buffers):
    """Base of services that answer at once: nobody waits for a reply."""

    beside: frozenset[FrameKind] = frozenset()
    parting: frozenset[FrameKind] = frozenset()
    idle_s = 60.0

    def __init__(self, limits: FrameLimits) -> None:
        super().__init__(limits)
        self.bytes_in = self.bytes_out = 0

    def disconnect(self, connection: int, now: float) -> Replies:
        with self.lock:
            self._buffers.pop(connection, None)
        return []

    def tick(self, now: float) -> Replies:
        return []

    def metrics(self) -> list[Metric]:
        return []


POLL_S = 0.2


class _Slot:
    def __init__(self, send: Callable[[Message], None] | None) -> None:
        self.event = threading.Event()
        self.reply: Message | None = None
        self.send = send
        self.request: Message | None = None  # whose reply `send` has not taken yet
        self.lock = threading.Lock()  # held while `send` runs


class Dispatcher:
    """Carries messages from connection threads to the service, and deferred replies back.

    A transport thread blocks in :meth:`call` until its own reply is due, or, where the connection
    was opened with ``send``, returns from :meth:`post` at once: whichever thread makes a reply due
    sends it, so that none has to be woken up for it. Thread-safe.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limits: FrameLimits = service.limits
        self._slots: dict[int, _Slot] = {}
        self._ids = itertools.count(1)
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="sparkdl-ps-tick", daemon=True)
        self._ticker.start()

    def open(self, send: Callable[[Message], None] | None = None) -> int:
        """A new connection.

        Args:
            send: Sends a reply over it, from any thread. An OSError is dropped: the connection's
                own thread sees that the peer is gone.
        """
        connection = next(self._ids)
        self._slots[connection] = _Slot(send)
        return connection

    def close(self, connection: int) -> None:
        """The connection is gone; when this returns, nobody sends over it any more."""
        slot = self._slots.pop(connection, None)
        if slot is not None:
            with slot.lock:
                slot.send = None
            self._deliver(self.service.disconnect(connection, time.monotonic()))

    def post(self, connection: int, message: Message) -> None:
        """Takes a request whose reply goes out by the connection's ``send``, now or later.

        Raises:
            ProtocolError: The request before it has no reply yet.
        """
        slot = self._slots[connection]
        if slot.request is not None:
            raise ProtocolError(
                f"a {message.kind.name} frame came too early",
                expected=f"the reply to {slot.request.kind.name} before the next request",
                received="two requests at a time over one connection",
            )
        slot.request = message
        self._deliver(self.service.receive(connection, message, time.monotonic()), connection)

    def call(
        self, connection: int, message: Message, connected: Callable[[], bool]
    ) -> Message | None:
        """The reply to ``message``; None if the peer went away, or the server ends, before it."""
        slot = self._slots[connection]
        slot.event.clear()
        slot.reply = None
        self._deliver(self.service.receive(connection, message, time.monotonic()))
        while not slot.event.wait(POLL_S):
            if self._closed.is_set() or not connected():
                return None
        reply = slot.reply
        if reply is not None:
            self._count(message, reply)
        return reply

    def answer(self, connection: int, message: Message) -> Message:
        """The reply to a message that is never deferred (HEARTBEAT), beside an outstanding one."""
        replies = self.service.receive(connection, message, time.monotonic())
        own = next(i for i, (number, _) in enumerate(replies) if number == connection)
        _, reply = replies.pop(own)
        self._deliver(replies)
        return reply

    def shutdown(self) -> None:
        """Ends the ticker and all waits."""
        self._closed.set()
        if self._ticker is not threading.current_thread():
            self._ticker.join(5)

    def _deliver(self, replies: Replies, own: int = 0) -> None:
        """Hands replies to their connections; ``own`` is that of this thread."""
        for connection, reply in replies:
            slot = self._slots.get(connection)
            if slot is None:
                continue
            if slot.send is None:
                slot.reply = reply
                slot.event.set()
            elif connection == own or not (reply.meta or reply.kind is Kind.CHUNK):
                self._send(slot, reply)
            else:  # a stopped peer's socket might not take it: this thread waits for nobody
                sender = threading.Thread(
                    target=self._send, args=(slot, reply), name="sparkdl-ps-send", daemon=True
                )
                try:
                    sender.start()
                except RuntimeError:  # there is no thread to be had, and no reply may be lost
                    self._send(slot, reply)

    def _send(self, slot: _Slot, reply: Message) -> None:
        with slot.lock, contextlib.suppress(OSError):
            request, slot.request = slot.request, None
            if slot.send is not None and request is not None:
                self._count(request, reply)
                slot.send(reply)

    def _count(self, request: Message, reply: Message) -> None:
        self.service.bytes_in += _size(request)
        self.service.bytes_out += _size(reply)

    def _tick(self) -> None:
        while not self._closed.wait(POLL_S):
            self._deliver(self.service.tick(time.monotonic()))


def _size(message: Message) -> int:
    return HEADER_BYTES + message.body_bytes
