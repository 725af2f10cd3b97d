"""Framed streams, server side: what socket and shm have in common. One thread per member."""

from __future__ import annotations

import contextlib
import socket
import threading

from sparkdl.errors import AuthenticationError, ProtocolError, SparkDLError, TransportError
from sparkdl.transport.dispatcher import Dispatcher
from sparkdl.transport.frames import (
    HEADER_BYTES,
    MAX_FIRST_META_BYTES,
    Kind,
    Limits,
    Message,
    decode_header,
    decode_meta,
    error_to_meta,
)
from sparkdl.transport.framing import receive_frame, send_frame
from sparkdl.transport.greeting import Greeter, Stranger
from sparkdl.transport.listening import is_connected, token_matches, tune

_FIRST_FRAME = Limits(blob_bytes=0, max_meta_bytes=MAX_FIRST_META_BYTES)


class _FirstFrame:
    """A stranger whose first frame must be OPEN with the token; a few kilobytes at most.

    Args:
        connection: Accepted; does not block.
        token: The run's secret.
    """

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
        with contextlib.suppress(BlockingIOError):
            while len(self._data) < self._wanted:
                piece = self.connection.recv(self._wanted - len(self._data))
                if not piece:
                    raise EOFError("the peer closed the connection")
                self._data += piece
                if self.opening is None and len(self._data) == HEADER_BYTES:
                    self.opening, meta_size, body_size = decode_header(self._data)
                    _FIRST_FRAME.check(self.opening, meta_size, body_size)
                    self._wanted += meta_size
        opening = self.opening
        if opening is None or len(self._data) < self._wanted:
            return False
        opening.meta = decode_meta(opening.kind, self._data[HEADER_BYTES:])
        shown = opening.meta.get("token")
        if opening.kind is not Kind.OPEN or not token_matches(shown, self._token):
            raise AuthenticationError(
                "a connection without the run's token",
                expected="OPEN with the token",
                received=opening.kind.name,
            )
        return True


class StreamServer:
    """Accepts framed connections on ``listener`` until closed.

    A connection's first frame is OPEN with the token. A peer without it gets nothing but a close.

    Args:
        listener: Listening stream socket; owned from now on.
        dispatcher: Where messages go.
        token: The run's secret.
        max_connections: Members beyond that are refused.
    """

    name = "socket"

    def __init__(
        self, listener: socket.socket, dispatcher: Dispatcher, token: str, max_connections: int
    ) -> None:
        self._dispatcher = dispatcher
        self._max_connections = max_connections
        self._members: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._greeter = Greeter(
            listener,
            lambda connection: _FirstFrame(connection, token),
            self._welcome,
            name=f"sparkdl-ps-{self.name}",
        )

    def close(self) -> None:
        """Stops accepting and closes all connections."""
        self._greeter.close()
        with self._lock:
            connections = list(self._members)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _welcome(self, stranger: Stranger) -> None:
        assert isinstance(stranger, _FirstFrame)
        assert stranger.opening is not None
        connection = stranger.connection
        with self._lock:
            self._members.add(connection)
            crowded = len(self._members) > self._max_connections
        threading.Thread(
            target=self._run, args=(connection, stranger.opening, crowded),
            name=f"sparkdl-ps-{self.name}", daemon=True,
        ).start()  # fmt: skip

    def _run(self, connection: socket.socket, opening: Message, crowded: bool) -> None:
        try:
            with contextlib.suppress(OSError, EOFError, SparkDLError):
                tune(connection)
                if crowded:
                    self._refuse(connection)
                else:
                    self._serve(connection, opening)
        finally:
            with self._lock:
                self._members.discard(connection)
            connection.close()

    def _refuse(self, connection: socket.socket) -> None:
        error = TransportError(
            "the server has no room for one more connection",
            expected=f"at most {self._max_connections} connections of this run",
            received="one more",
            hint="connections of attempts that have ended are closed within the grace time",
        )
        message = Message(Kind.ERROR, meta=error_to_meta(error))
        send_frame(connection, message, self._dispatcher.limits)

    def _serve(self, connection: socket.socket, opening: Message) -> None:
        """Answers OPEN, then request after request, until the peer closes."""
        dispatcher = self._dispatcher
        number = dispatcher.open()
        try:
            self._answer_open(connection, opening, number)
            self._exchange(connection, number)
        finally:
            dispatcher.close(number)

    def _answer_open(self, connection: socket.socket, opening: Message, number: int) -> None:
        send_frame(connection, Message(Kind.OK), self._dispatcher.limits)

    def _exchange(self, connection: socket.socket, number: int) -> None:
        dispatcher, limits = self._dispatcher, self._dispatcher.limits
        while True:
            try:
                message = self._receive(connection, number)
            except ProtocolError as error:  # the stream is out of step: say so and close
                send_frame(connection, Message(Kind.ERROR, meta=error_to_meta(error)), limits)
                return
            reply = dispatcher.call(number, message, lambda: is_connected(connection))
            if reply is None:
                return
            try:
                self._send(connection, number, reply)
            except ProtocolError as error:  # it cannot be encoded; nothing of it was sent
                send_frame(connection, Message(Kind.ERROR, meta=error_to_meta(error)), limits)

    def _receive(self, connection: socket.socket, number: int) -> Message:
        service = self._dispatcher.service
        return receive_frame(connection, self._dispatcher.limits, lambda: service.buffer(number))

    def _send(self, connection: socket.socket, number: int, reply: Message) -> None:
        send_frame(connection, reply, self._dispatcher.limits)
