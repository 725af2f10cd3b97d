"""What all transports share: dispatching to the state, listening sockets, framed streams."""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from sparkdl.errors import ConfigError, ProtocolError, ResourceError
from sparkdl.ps.messages import (
    HEADER_BYTES,
    ByteArray,
    Kind,
    Limits,
    Message,
    PiecewiseBody,
    check_sizes,
    decode_header,
    decode_meta,
    encode,
)
from sparkdl.ps.state import Replies, ServerState

PortSpec = int | str | tuple[int, int]
POLL_S = 0.2


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


class _Slot:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.reply: Message | None = None


class Dispatcher:
    """Carries messages from connection threads to the state, and deferred replies back.

    Each transport thread blocks in :meth:`call` until its own reply is due. Thread-safe.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.limits: Limits = state.limits
        self._slots: dict[int, _Slot] = {}
        self._ids = itertools.count(1)
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="sparkdl-ps-tick", daemon=True)
        self._ticker.start()

    @property
    def connections(self) -> int:
        return len(self._slots)

    def open(self) -> int:
        """A new connection."""
        connection = next(self._ids)
        self._slots[connection] = _Slot()
        return connection

    def close(self, connection: int) -> None:
        """The connection is gone."""
        if self._slots.pop(connection, None) is not None:
            self._deliver(self.state.disconnect(connection, time.monotonic()))

    def call(
        self, connection: int, message: Message, connected: Callable[[], bool]
    ) -> Message | None:
        """The reply to ``message``; None if the peer went away, or the server ends, before it."""
        slot = self._slots[connection]
        slot.event.clear()
        slot.reply = None
        self._deliver(self.state.receive(connection, message, time.monotonic()))
        while not slot.event.wait(POLL_S):
            if self._closed.is_set() or not connected():
                return None
        reply = slot.reply
        if reply is not None:
            self.state.bytes_in += _size(message)
            self.state.bytes_out += _size(reply)
        return reply

    def answer(self, connection: int, message: Message) -> Message:
        """The reply to a message that is never deferred (HEARTBEAT), beside an outstanding one."""
        replies = self.state.receive(connection, message, time.monotonic())
        own = next(i for i, (number, _) in enumerate(replies) if number == connection)
        _, reply = replies.pop(own)
        self._deliver(replies)
        return reply

    def shutdown(self) -> None:
        """Ends the ticker and all waits."""
        self._closed.set()
        if self._ticker is not threading.current_thread():
            self._ticker.join(5)

    def _deliver(self, replies: Replies) -> None:
        for connection, reply in replies:
            slot = self._slots.get(connection)
            if slot is not None:
                slot.reply = reply
                slot.event.set()

    def _tick(self) -> None:
        while not self._closed.wait(POLL_S):
            self._deliver(self.state.tick(time.monotonic()))


def _size(message: Message) -> int:
    return HEADER_BYTES + message.body_bytes


def token_matches(received: object, token: str) -> bool:
    """Compares in constant time; anything but a str is wrong."""
    return isinstance(received, str) and hmac.compare_digest(received.encode(), token.encode())


# -------------------------------------------------------------------- listening


def ports_of(spec: PortSpec) -> Iterable[int]:
    """The ports to try: ``0`` any free one, ``7000``, ``'7000-7010'`` or ``(7000, 7010)``.

    Raises:
        ConfigError: It is none of these.
    """
    try:
        if isinstance(spec, str):
            first, _, last = spec.partition("-")
            edges = int(first), int(last or first)
        elif isinstance(spec, tuple):
            edges = int(spec[0]), int(spec[1])
        else:
            edges = int(spec), int(spec)
    except (TypeError, ValueError, IndexError):
        edges = (-1, -1)
    if not 0 <= edges[0] <= edges[1] <= 65535:
        raise ConfigError(
            "this is no port",
            expected="0 for any free one, 7000, '7000-7010' or (7000, 7010)",
            received=repr(spec),
        )
    return range(edges[0], edges[1] + 1)


def listen(bind_address: str, spec: PortSpec, *, backlog: int = 1024) -> socket.socket:
    """A listening TCP socket on the first free port of ``spec``; IPv4 or IPv6.

    Raises:
        ResourceError: No port of ``spec`` is free, or the address is not this host's.
    """
    host = bind_address.strip("[]")
    last: OSError | None = None
    for port in ports_of(spec):
        try:
            info = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise ResourceError(
                f"cannot resolve bind_address {bind_address!r}", received=str(error)
            ) from error
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(info[4])
            listener.listen(backlog)
            return listener
        except OSError as error:
            listener.close()
            last = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    raise ResourceError(
        f"cannot listen on {bind_address!r}, port {spec!r}",
        expected="a free port on an address of this host",
        received=str(last),
        hint="port=0 takes any free one; a range such as '7000-7010' the first free one",
    )


def tune(connection: socket.socket) -> None:
    """No delays for small frames; a vanished host is noticed within about half a minute."""
    with contextlib.suppress(OSError):  # a Unix socket has none of these
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_connected(connection: socket.socket) -> bool:
    """False once the peer has closed; to be asked while no bytes are expected from it."""
    poller = select.poll()  # select() fails on descriptors above 1023
    try:
        poller.register(connection, select.POLLIN)
        if not poller.poll(0):
            return True
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return False


# -------------------------------------------------------------------- framed streams


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills ``view``.

    Raises:
        EOFError: The peer closed before it was full.
    """
    position, size = 0, len(view)
    while position < size:
        count = connection.recv_into(view[position:])
        if count == 0:
            raise EOFError("the peer closed the connection")
        position += count


def receive_frame(
    connection: socket.socket,
    limits: Limits,
    buffer: Callable[[], ByteArray],
    *,
    inline_weights: bool = True,
) -> Message:
    """Reads one frame; its body goes straight into ``buffer()``.

    Args:
        connection: A stream socket.
        limits: Checked before anything is allocated.
        buffer: Called only for a frame with a body.
        inline_weights: Whether the body follows on the stream; otherwise it is in ``buffer()``
            already (shared memory).
    """
    head = bytearray(HEADER_BYTES)
    receive_into(connection, memoryview(head))
    message, meta_len, body_len = decode_header(head)
    check_sizes(message.kind, meta_len, body_len, limits, message.flags)
    if meta_len:
        meta = bytearray(meta_len)
        receive_into(connection, memoryview(meta))
        message.meta = decode_meta(message.kind, meta)
    if body_len:
        message.body = buffer()[:body_len]
        if inline_weights:
            receive_into(connection, message.body.data)
    return message


def send_frame(
    connection: socket.socket, message: Message, limits: Limits, *, inline_weights: bool = True
) -> None:
    """Writes one frame; the body from where it lies."""
    connection.sendall(encode(message, max_meta_bytes=limits.max_meta_bytes))
    if not inline_weights:
        return
    if message.reading is not None:
        send_reading(connection, message.reading)
    elif message.body is not None:
        connection.sendall(message.body.data)


def send_reading(connection: socket.socket, reading: PiecewiseBody) -> None:
    """Writes a body that may change: never blocks while it holds a piece of it.

    Raises:
        TimeoutError: The peer took nothing for the socket's timeout.
    """
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    limit_s = connection.gettimeout()
    done = False

    def send(piece: memoryview) -> int:
        try:
            return connection.send(piece, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    while not done:
        if not poller.poll(None if limit_s is None else limit_s * 1000):
            raise TimeoutError("the peer reads nothing")
        done = reading.read(send)


def require_raw(raw: ByteArray | None) -> ByteArray:
    """``raw``, or a ProtocolError on a channel that was opened without a buffer."""
    if raw is None:
        raise ProtocolError("a body came over a control channel")
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


__all__ = [
    "Channel",
    "Dispatcher",
    "Kind",
    "PortSpec",
    "deliver_body",
    "is_connected",
    "listen",
    "ports_of",
    "receive_frame",
    "receive_into",
    "require_raw",
    "send_frame",
    "token_matches",
    "tune",
]
