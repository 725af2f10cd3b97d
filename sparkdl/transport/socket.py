"""Framed TCP: the body is received straight into, and sent straight from, one buffer."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable

import numpy as np

from sparkdl.errors import AuthenticationError, ProtocolError, SparkDLError
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import require_raw
from sparkdl.transport.frames import (
    HEADER_BYTES,
    MAX_FIRST_META_BYTES,
    Body,
    ByteArray,
    FrameLimits,
    Kind,
    Message,
    PiecewiseBody,
    decode_header,
    decode_meta,
    encode,
    error_from_meta,
    error_to_meta,
)
from sparkdl.transport.service import Dispatcher
from sparkdl.wire.greeting import Greeter, Stranger, hear_bytes, hear_out, no_room
from sparkdl.wire.listening import is_connected, receive_into, shut_down, token_matches, tune
from sparkdl.wire.proving import IncomingProof
from sparkdl.wire.tls import ServerEncryption, connect_encrypted, first_knock

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


class StreamChannel:
    """A client's end of a framed connection, for one who has proved the token or will do so."""

    name = "socket"
    inline_body = True
    """See :func:`receive_frame`."""

    def __init__(
        self, connection: socket.socket, limits: FrameLimits, raw: ByteArray | None
    ) -> None:
        self._socket, self._limits, self.raw = connection, limits, raw

    def request(self, message: Message, timeout_s: float | None) -> Message:
        self._socket.settimeout(timeout_s)
        raw, limits = self.raw, self._limits
        return exchange(
            self._socket, message, limits, lambda: require_raw(raw), inline_body=self.inline_body
        )

    def abort(self) -> None:
        shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()


def connect_stream(endpoint: Endpoint, limits: FrameLimits, timeout_s: float) -> socket.socket:
    """A framed TCP connection whose server has accepted the token.

    Raises:
        AuthenticationError: The server closed at the sight of the token, or is another one.
        BusyError: The server has no room now.
        OSError: The server cannot be reached.
    """
    address = endpoint.address
    connection = socket.create_connection((address.host.strip("[]"), address.port), timeout_s)
    try:
        tune(connection)
        if endpoint.fingerprint:
            connection = connect_encrypted(connection, endpoint.token, endpoint.fingerprint)
        open_stream(connection, endpoint.token, limits)
    except BaseException:
        connection.close()
        raise
    return connection


def open_stream(connection: socket.socket, token: str, limits: FrameLimits, **meta: bool) -> None:
    """Sends OPEN; returns when the server has accepted the token.

    Raises:
        AuthenticationError: It closed instead.
        BusyError: It has no room now; another try may find some.
        OSError: The connection broke.
    """
    opening = Message(Kind.OPEN, meta={"token": token, **meta})
    try:
        reply = exchange(connection, opening, limits, lambda: require_raw(None))
    except EOFError as error:
        raise AuthenticationError(
            "the parameter server closed the connection at the sight of the token",
            expected="the token of this run",
            received="another one, or a server that is going down",
            hint="workers of an earlier run cannot join a later one",
        ) from error
    if reply.kind is Kind.ERROR:
        raise error_from_meta(reply.meta)


FIRST_FRAME = FrameLimits(blob_bytes=0, max_meta_bytes=MAX_FIRST_META_BYTES)
"""The limits of a first frame."""


class FirstFrame:
    """A connection whose first frame must be OPEN with the token."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self.opening: Message | None = None
        self._token = token
        self._data = bytearray()
        self._wanted = HEADER_BYTES

    def hear(self) -> bool:
        """Reads what has come; True once the frame is whole and has the token.

        Raises:
            OSError, EOFError: The peer is gone.
            ProtocolError: These bytes are no first frame.
            AuthenticationError: It has another token, or none.
        """
        if not hear_bytes(self.connection, self._data, self._wanted):
            return False
        if self.opening is None:
            self.opening, meta_size, body_size = decode_header(self._data, FIRST_FRAME.kinds)
            FIRST_FRAME.check(self.opening, meta_size, body_size)
            self._wanted += meta_size
            if not hear_bytes(self.connection, self._data, self._wanted):
                return False
        opening = self.opening
        opening.meta = decode_meta(opening.kind, self._data[HEADER_BYTES:])
        if opening.kind is not Kind.OPEN or not token_matches(
            opening.meta.get("token"), self._token
        ):
            raise AuthenticationError(
                "a connection without the run's token", expected="OPEN with the token",
                received=opening.kind.name,
            )  # fmt: skip
        return True

    def turn_away(self) -> None:
        """Says that there is no room, if the peer's end takes it at once."""
        self.connection.send(encode(Message(Kind.ERROR, meta=error_to_meta(no_room()))))


class StreamServer:
    """Accepts framed connections on ``listener`` until closed.

    A connection's first frame is OPEN with the token. A peer without it gets nothing but a close.
    In an encrypted run the connection proves before that that it knows the token, and begins TLS.
    """

    name = "socket"
    inline_body = True
    """See :func:`receive_frame`."""

    def __init__(
        self,
        listener: socket.socket,
        dispatcher: Dispatcher,
        token: str,
        max_connections: int,
        encryption: ServerEncryption | None = None,
    ) -> None:
        self._dispatcher, self._token = dispatcher, token
        self._max_connections = max_connections
        self._encryption = encryption
        self._members: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._greeter = Greeter(
            listener, self._introduce, self._welcome, name=f"sparkdl-ps-{self.name}"
        )

    def close(self) -> None:
        """Stops accepting and closes all connections."""
        self._greeter.close()
        with self._lock:
            connections = list(self._members)
        for connection in connections:
            shut_down(connection)

    def _introduce(self, connection: socket.socket) -> FirstFrame | IncomingProof:
        if self._encryption is None:
            return FirstFrame(connection, self._token)
        return first_knock(connection, self._token)

    def _welcome(self, stranger: Stranger) -> None:
        with self._lock:
            self._members.add(stranger.connection)
            crowded = len(self._members) > self._max_connections
        try:
            threading.Thread(
                target=self._run, args=(stranger, crowded), name=f"sparkdl-ps-{self.name}",
                daemon=True,
            ).start()  # fmt: skip
        except BaseException:
            with self._lock:
                self._members.discard(stranger.connection)
            raise

    def _run(self, stranger: Stranger, crowded: bool) -> None:
        connection = stranger.connection
        try:
            with contextlib.suppress(OSError, EOFError, SparkDLError):
                tune(connection)
                if crowded:
                    stranger.turn_away()
                    return
                opening = stranger.opening if isinstance(stranger, FirstFrame) else None
                if self._encryption is not None:
                    connection, until = self._encryption.begin(connection)
                    with self._lock:
                        self._members.discard(stranger.connection)
                        self._members.add(connection)
                    connection.do_handshake()
                    first = FirstFrame(connection, self._token)
                    hear_out(first, until)
                    opening = first.opening
                assert opening is not None
                self._serve(connection, opening)
        finally:
            with self._lock:
                self._members.discard(connection)
            connection.close()

    def _serve(self, connection: socket.socket, opening: Message) -> None:
        """Answers OPEN, then request after request, until the peer closes."""
        number = self._open(connection)
        try:
            self._answer_open(connection, opening, number)
            self._exchange(connection, number)
        finally:
            self._dispatcher.close(number)

    def _open(self, connection: socket.socket) -> int:
        return self._dispatcher.open()

    def _answer_open(self, connection: socket.socket, opening: Message, number: int) -> None:
        send_frame(connection, Message(Kind.OK), self._dispatcher.limits)

    def _exchange(self, connection: socket.socket, number: int) -> None:
        while True:
            try:
                message = self._receive(connection, number)
            except ProtocolError as error:  # the stream is out of step: say so and close
                self._refuse(connection, error)
                return
            reply = self._dispatcher.call(number, message, lambda: is_connected(connection))
            if reply is None:
                return
            self._answer(connection, number, reply)

    def _answer(self, connection: socket.socket, number: int, reply: Message) -> None:
        try:
            self._send(connection, number, reply)
        except ProtocolError as error:  # it cannot be encoded; nothing of it was sent
            self._refuse(connection, error)

    def _refuse(self, connection: socket.socket, error: ProtocolError) -> None:
        reply = Message(Kind.ERROR, meta=error_to_meta(error))
        send_frame(connection, reply, self._dispatcher.limits)

    def _receive(self, connection: socket.socket, number: int) -> Message:
        service = self._dispatcher.service
        limits, inline = self._dispatcher.limits, self.inline_body
        return receive_frame(connection, limits, lambda: service.buffer(number), inline_body=inline)

    def _send(self, connection: socket.socket, number: int, reply: Message) -> None:
        send_frame(connection, reply, self._dispatcher.limits, inline_body=self.inline_body)
