"""Frames on a stream socket: received straight into a buffer, sent straight from one."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable

import numpy as np

from sparkdl.transport.frames import (
    HEADER_BYTES,
    Body,
    ByteArray,
    FrameLimits,
    Message,
    PiecewiseBody,
    decode_header,
    decode_meta,
    encode,
)
from sparkdl.wire.listening import receive_into

_COPY_BYTES = 1 << 20


def receive_frame(
    connection: socket.socket,
    limits: FrameLimits,
    buffer: Callable[[], ByteArray],
    *,
    inline_body: bool = True,
) -> Message:
    """Reads one frame; its body goes straight into ``buffer()``.

    Args:
        connection: A stream socket.
        limits: Checked before anything is allocated.
        buffer: Called only for a frame with a body.
        inline_body: Whether the body follows on the stream; otherwise it is in ``buffer()``
            already (shared memory). A blob always follows, and then gets memory of its own: the
            shared buffer may hold weights that another thread reads.
    """
    head = bytearray(HEADER_BYTES)
    receive_into(connection, memoryview(head))
    message, meta_len, body_len = decode_header(head, limits.kinds)
    limits.check(message, meta_len, body_len)
    if meta_len:
        meta = bytearray(meta_len)
        receive_into(connection, memoryview(meta))
        message.meta = decode_meta(message.kind, meta)
    if body_len:
        apart = not inline_body and message.kind.body is Body.CHUNK
        message.body = np.empty(body_len, np.uint8) if apart else buffer()[:body_len]
        if inline_body or apart:
            receive_into(connection, message.body.data)
    return message


def send_frame(
    connection: socket.socket, message: Message, limits: FrameLimits, *, inline_body: bool = True
) -> None:
    """Writes one frame; the body from where it lies."""
    connection.sendall(encode(message, max_meta_bytes=limits.max_meta_bytes))
    if not inline_body and message.kind.body is not Body.CHUNK:
        return
    if message.reading is not None:
        send_reading(connection, message.reading)
    elif message.body is not None:
        connection.sendall(message.body.data)


def exchange(
    connection: socket.socket,
    message: Message,
    limits: FrameLimits,
    buffer: Callable[[], ByteArray],
    *,
    inline_body: bool = True,
) -> Message:
    """Writes a request and reads its reply, also where the server closed before all was written.

    It may have refused the request, or the connection, by then: its reply says why.

    Raises:
        EOFError: The server closed without a reply.
        OSError: The connection broke.
    """
    broken: OSError | None = None
    try:
        send_frame(connection, message, limits, inline_body=inline_body)
    except (BrokenPipeError, ConnectionResetError) as error:
        broken = error
    try:
        return receive_frame(connection, limits, buffer, inline_body=inline_body)
    except EOFError:
        if broken is not None:
            raise broken from None
        raise


def send_reading(connection: socket.socket, reading: PiecewiseBody) -> None:
    """Writes a body that may change: never blocks while it holds a piece of it.

    Raises:
        TimeoutError: The peer took nothing for the socket's timeout.
    """
    if isinstance(connection, ssl.SSLSocket):
        _send_encrypted(connection, reading)
        return
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


def _send_encrypted(connection: ssl.SSLSocket, reading: PiecewiseBody) -> None:
    """The same over TLS, which cannot say beforehand how much it takes: pieces are copied."""
    copy = memoryview(bytearray(min(_COPY_BYTES, reading.nbytes)))
    copied = 0

    def take(piece: memoryview) -> int:
        nonlocal copied
        copied = min(len(piece), len(copy))
        copy[:copied] = piece[:copied]
        return copied

    done = False
    while not done:
        done = reading.read(take)
        connection.sendall(copy[:copied])
