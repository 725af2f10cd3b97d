"""Framed streams, server side: what socket and shm have in common. One thread per connection."""

from __future__ import annotations

import contextlib
import socket
import threading

from sparkdl.errors import AuthenticationError, ProtocolError, SparkDLError
from sparkdl.transport.dispatcher import Dispatcher
from sparkdl.transport.frames import (
    MAX_FIRST_META_BYTES,
    ByteArray,
    Kind,
    Limits,
    Message,
    error_to_meta,
)
from sparkdl.transport.framing import receive_frame, send_frame
from sparkdl.transport.listening import is_connected, token_matches, tune

FIRST_FRAME_TIMEOUT_S = 5.0
_FIRST_FRAME = Limits(blob_bytes=0, max_meta_bytes=MAX_FIRST_META_BYTES)


class StreamServer:
    """Accepts framed connections on ``listener`` until closed.

    A connection's first frame is OPEN with the token: bounded to a few kilobytes and a few
    seconds. A peer without the token gets nothing but a close.

    Args:
        listener: Listening stream socket; owned from now on.
        dispatcher: Where messages go.
        token: The run's secret.
        max_connections: Beyond that, newcomers are closed at once.
    """

    name = "socket"

    def __init__(
        self, listener: socket.socket, dispatcher: Dispatcher, token: str, max_connections: int
    ) -> None:
        self._listener = listener
        self._dispatcher = dispatcher
        self._token = token
        self._max_connections = max_connections
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(
            target=self._accept, name=f"sparkdl-ps-{self.name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops accepting and closes all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                full = len(self._connections) >= self._max_connections
                if not full:
                    self._connections.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(
                target=self._run, args=(connection,), name=f"sparkdl-ps-{self.name}", daemon=True
            ).start()

    def _run(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, EOFError, SparkDLError):
                self._greet(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Reads the token, then serves; raises for anybody without it."""
        tune(connection)
        connection.settimeout(FIRST_FRAME_TIMEOUT_S)
        opening = receive_frame(connection, _FIRST_FRAME, _no_buffer)
        if opening.kind is not Kind.OPEN or not token_matches(
            opening.meta.get("token"), self._token
        ):
            raise AuthenticationError("a connection without the run's token")
        connection.settimeout(None)
        self._serve(connection, opening)

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


def _no_buffer() -> ByteArray:
    raise ProtocolError("a body before the token")
