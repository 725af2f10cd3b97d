"""Between cheroot and the app: first requests, member connections, bodies without a copy."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cheroot import wsgi
from cheroot.server import HTTPConnection

from sparkdl.errors import AuthenticationError, ProtocolError
from sparkdl.transport.frames import Message
from sparkdl.transport.socket import send_reading
from sparkdl.wire.greeting import Greeter, Stranger, no_room
from sparkdl.wire.listening import shut_down, token_matches, tune
from sparkdl.wire.proving import BUSY, IncomingProof
from sparkdl.wire.tls import KNOCK, ServerEncryption, first_knock

IO_TIMEOUT_S = 20.0
S = TypeVar("S", bound=Stranger)


class ReplyBody:
    """A response's head and body; tells when the WSGI server is through with them."""

    def __init__(self, head: bytes, reply: Message, done: Callable[[], None] | None) -> None:
        self._head, self._reply, self._done = head, reply, done

    def __iter__(self) -> Iterator[Any]:
        yield self._head
        reading, body = self._reply.reading, self._reply.body
        if reading is not None:
            yield reading
        elif body is not None:
            yield body.data

    def close(self) -> None:
        if self._done is not None:
            self._done()
            self._done = None


ANSWERED = "sparkdl.answered"
"""Key in a request's environ, set by the app that answers a member's frame."""


class Gateway(wsgi.Gateway_10):
    """cheroot's gateway with two short cuts past its Python-level buffers.

    A connection outlives a response only where that answers a member's frame: others may be
    strangers', and whatever cheroot keeps it keeps for minutes, and gives it a thread at its next
    byte.
    """

    def get_environ(self) -> Any:
        environ: Any = super().get_environ()  # type: ignore[no-untyped-call]
        self._tcp: socket.socket = self.req.conn.socket
        environ["sparkdl.read"] = self._read
        environ["sparkdl.socket"] = self._tcp
        return environ

    def _read(self, view: memoryview) -> None:
        """Fills ``view``: what cheroot has buffered first, the rest straight from the socket."""
        stream, reader = self.req.rfile, self.req.conn.rfile
        if len(view) > stream.remaining:
            raise EOFError("the request's body is shorter than its frame")
        position = 0
        if reader.has_data():
            chunk = reader.read(min(len(view), len(reader._read_buf) - reader._read_pos))
            view[: len(chunk)] = chunk
            position = len(chunk)
        while position < len(view):
            count = self._tcp.recv_into(view[position:])
            if count == 0:
                raise EOFError("the client closed the connection")
            position += count
        stream.remaining -= len(view)

    def respond(self) -> None:
        response = self.req.server.wsgi_app(self.env, self.start_response)
        try:
            for chunk in response:
                self.write(chunk)
        finally:
            self.req.ensure_headers_sent()
            if hasattr(response, "close"):
                response.close()

    def start_response(self, *arguments: object) -> Any:
        # cheroot would read an unread body, of any size, to its end; a chunked one has no known end
        unread = getattr(self.req.rfile, "remaining", True)
        if unread or ANSWERED not in self.env:
            self.req.close_connection = True
        return super().start_response(*arguments)

    def write(self, chunk: Any) -> None:
        if isinstance(chunk, bytes):
            if chunk:
                super().write(chunk)
            return
        self.req.ensure_headers_sent()
        if isinstance(chunk, memoryview):
            self._tcp.sendall(chunk)
        else:
            send_reading(self._tcp, chunk)


class TunedConnection(HTTPConnection):
    """A connection whose small responses leave at once, and whose silence is bounded."""

    def __init__(self, server: object, sock: socket.socket, *arguments: object) -> None:
        super().__init__(server, sock, *arguments)
        tune(sock)  # not every kernel hands TCP_NODELAY on from the listener
        sock.settimeout(IO_TIMEOUT_S)  # within a request; between requests the server's applies


FIRST_HEADERS_BYTES = 4 << 10
"""Most bytes of the head of an HTTP client's first request; proxies may have added some."""
_HTTP_REFUSAL = (
    b"HTTP/1.1 401 Unauthorized\r\nContent-Type: text/plain\r\nContent-Length: 15\r\n"
    b"Connection: close\r\n\r\na wrong token.\n"
)
_HTTP_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n"
    b"Connection: close\r\n\r\nno room.\n"
)
_OPEN_TO_ALL = ("/health", "/metrics")
OPEN_PER_SECOND = 20.0
"""Requests for what is open to all that are served: enough for a few monitors."""


class Allowance:
    """A limit on requests per second, with as many at once after a pause; for one thread."""

    def __init__(self, per_second: float) -> None:
        self._per_second = self._left = per_second
        self._seen = time.monotonic()

    def take(self) -> bool:
        """Whether one more is allowed now."""
        now = time.monotonic()
        grown = self._left + (now - self._seen) * self._per_second
        self._left, self._seen = min(self._per_second, grown), now
        allowed = self._left >= 1
        self._left -= allowed
        return allowed


class FirstRequest:
    """A connection whose first request must have the token, or ask for what is open to all.

    The request stays in the socket, for the HTTP server to read. Where the server is encrypted,
    members knock instead, and only what is open to all is served without TLS.
    """

    def __init__(
        self, connection: socket.socket, token: str, encrypted: bool, allowance: Allowance
    ) -> None:
        self.connection = connection
        self._token, self._encrypted, self._allowance = token, encrypted, allowance
        self._knock: IncomingProof | None = None

    @property
    def knocks(self) -> bool:
        """Whether the peer has knocked: it means to begin TLS, and its words are read."""
        return self._knock is not None

    def hear(self) -> bool:
        """Looks at what has come; True once the headers, or the proof of a knock, are there.

        Raises:
            EOFError: The peer is gone.
            ProtocolError: The headers are too large.
            AuthenticationError: There is no token, or another one; the peer has been told, unless
                it knocks.
            TransportError: There were many requests for what is open to all; it has been told.
        """
        if self._knock is not None:
            return self._knock.hear()
        try:
            seen = self.connection.recv(FIRST_HEADERS_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not seen:
            raise EOFError("the peer closed the connection")
        if self._encrypted and KNOCK.startswith(seen[: len(KNOCK)]):
            self._knock = first_knock(self.connection, self._token)
            return self._knock.hear()
        head, end, _ = seen.partition(b"\r\n\r\n")
        if not end:
            if len(seen) < FIRST_HEADERS_BYTES:
                return False
            raise ProtocolError(
                "the headers of a first request are too large",
                expected=f"at most {FIRST_HEADERS_BYTES} bytes",
                received=f"{len(seen)} bytes without an end",
            )
        request, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        fields = {name.strip().lower(): value for name, _, value in pairs}
        method, _, path = request.partition(" ")
        open_to_all = method == "GET" and path.split(" ")[0] in _OPEN_TO_ALL
        known = not self._encrypted and has_token(fields.get("authorization", ""), self._token)
        if not open_to_all and not known:
            self.connection.recv(FIRST_HEADERS_BYTES)
            self.connection.send(_HTTP_REFUSAL)
            raise AuthenticationError(
                "a wrong or missing bearer token", expected="the token of this run",
                received="another one, or none",
            )  # fmt: skip
        if not known and not self._allowance.take():
            self.connection.recv(FIRST_HEADERS_BYTES)
            self.connection.send(_HTTP_BUSY)
            raise no_room()
        return True

    def turn_away(self) -> None:
        """Says that there is no room, if the peer's end takes it at once."""
        with contextlib.suppress(BlockingIOError):  # what is unread would reset the connection
            self.connection.recv(FIRST_HEADERS_BYTES)
        self.connection.send(BUSY if self._encrypted else _HTTP_BUSY)


def has_token(authorization: str, token: str) -> bool:
    """Whether an ``Authorization`` header is the bearer of the run's token."""
    scheme, _, shown = authorization.strip().partition(" ")
    return scheme.lower() == "bearer" and token_matches(shown.strip(), token)


class GreetedServer(wsgi.Server):
    """cheroot on connections that a greeter has welcomed, in threads from now on until closed.

    Args:
        introduce, peeks: See :class:`sparkdl.wire.greeting.Greeter`.
        name: Of the server's thread.
        options: Of cheroot's server.
    """

    gateway_kind: type[wsgi.Gateway_10] = wsgi.Gateway_10

    def __init__(
        self,
        listener: socket.socket,
        app: Any,
        introduce: Callable[[socket.socket], S],
        *,
        name: str,
        encryption: ServerEncryption | None = None,
        peeks: bool | Callable[[S], bool] = True,
        **options: Any,
    ) -> None:
        self._members = Members(listener, encryption)
        super().__init__(self._members.getsockname(), app, server_name="sparkdl", **options)
        self.gateway = self.gateway_kind
        self.prepare()
        greeter = f"{name}-greeter"
        self._greeter = Greeter(listener, introduce, self._members.put, peeks=peeks, name=greeter)
        self._thread = threading.Thread(target=self.serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops accepting and ends the threads."""
        self._greeter.close()
        self.stop()
        self._thread.join(10)

    def bind(self, family: int, kind: int, proto: int = 0) -> Any:
        """The function by which cheroot opens a listening socket."""
        self.socket = self._members
        return self._members


class Members:
    """The connections that cheroot takes from its listening socket: those that the greeter has
    welcomed.
    """

    def __init__(self, listener: socket.socket, encryption: ServerEncryption | None = None) -> None:
        self._name = listener.getsockname()
        self._encryption = encryption
        self._waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._handshakes: set[socket.socket] = set()
        self._closed = False

    def put(self, stranger: Stranger) -> None:
        """A connection for cheroot; one that has knocked begins TLS first, in a thread.

        Cheroot gets each when its first request comes: it would hold a thread for it at once.
        """
        if isinstance(stranger, FirstRequest) and stranger.knocks:
            threading.Thread(
                target=self._secure, args=(stranger.connection,), name="sparkdl-ps-http-tls",
                daemon=True,
            ).start()  # fmt: skip
        else:
            self._hand_over(stranger.connection)

    def _secure(self, connection: socket.socket) -> None:
        assert self._encryption is not None
        with contextlib.suppress(OSError):
            secured, until = self._encryption.begin(connection)
            with self._lock:
                self._handshakes.add(secured)
            try:
                secured.do_handshake()
                _wait_readable(secured, until)
            except OSError:
                secured.close()
                raise
            finally:
                with self._lock:
                    self._handshakes.discard(secured)
            self._hand_over(secured)

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._waiting.put(connection)
            self._wake.send(b"m")

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """The next connection; cheroot calls it when :meth:`fileno` is readable."""
        self._woken.recv(1)
        return self._waiting.get_nowait(), ("", 0)

    def fileno(self) -> int:
        return self._woken.fileno()

    def getsockname(self) -> tuple[str, int]:
        host, port = self._name[:2]
        return host, port

    def settimeout(self, _: float) -> None:
        """Cheroot sets one; accept() never waits."""

    def listen(self, _: int) -> None:
        """The greeter listens."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for secured in self._handshakes:
                shut_down(secured)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait().close()
            self._wake.close()
            self._woken.close()


def _wait_readable(connection: socket.socket, until: float) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if not poller.poll(1000 * max(until - time.monotonic(), 0.0)):
        raise TimeoutError("no request in time")
