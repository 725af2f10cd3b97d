"""HTTP: a Flask app behind cheroot, which passes ingresses and firewalls that raw TCP does not.

``POST /v1/frame`` takes and answers one frame; ``GET /health`` and ``GET /metrics`` are for people
and Prometheus. HTTP has no connections of its own, so a client names itself by a random id, and
its lease alone says whether it lives. Bodies are read from the socket straight into the client's
buffer, and sent straight from one: two small hooks into cheroot's gateway do that.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cheroot import wsgi
from cheroot.server import HTTPConnection

from sparkdl.errors import AuthenticationError, ProtocolError, SparkDLError, TransportError
from sparkdl.transport.dispatcher import Dispatcher
from sparkdl.transport.frames import (
    HEADER_BYTES,
    Kind,
    Limits,
    Message,
    encode,
    error_to_meta,
)
from sparkdl.transport.framing import send_reading
from sparkdl.transport.greeting import Greeter, Stranger
from sparkdl.transport.http_client import (
    BUSY,
    CLIENT_HEADER,
    FRAME_PATH,
    Reader,
    read_head,
    read_meta,
)
from sparkdl.transport.listening import is_connected, token_matches, tune

if TYPE_CHECKING:
    from flask import Flask, Response

IO_TIMEOUT_S = 20.0
MAX_HEADER_BYTES = 16 << 10
_REFUSAL = (
    b"HTTP/1.1 401 Unauthorized\r\nContent-Type: text/plain\r\nContent-Length: 15\r\n"
    b"Connection: close\r\n\r\na wrong token.\n"
)


class _Clients:
    """Client ids and the dispatcher's connections; those idle for long are closed."""

    def __init__(self, dispatcher: Dispatcher, max_clients: int, idle_s: float) -> None:
        self._dispatcher = dispatcher
        self._max_clients = max_clients
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, threading.Lock]] = {}
        self._seen: dict[str, float] = {}

    def find(self, client: str) -> tuple[int, threading.Lock]:
        """The connection of ``client`` and the lock of its one outstanding request."""
        now = time.monotonic()
        with self._lock:
            for old in [c for c, t in self._seen.items() if now - t > self._idle_s]:
                number, busy = self._known[old]
                if old != client and not busy.locked():
                    self._drop(old, number)
            if client not in self._known:
                if len(self._known) >= self._max_clients:
                    raise ProtocolError("too many clients", expected=f"at most {self._max_clients}")
                self._known[client] = (self._dispatcher.open(), threading.Lock())
            self._seen[client] = now
            return self._known[client]

    def forget(self, client: str) -> None:
        with self._lock:
            if client in self._known:
                self._drop(client, self._known[client][0])

    def _drop(self, client: str, number: int) -> None:
        del self._known[client], self._seen[client]
        self._dispatcher.close(number)


def make_app(dispatcher: Dispatcher, token: str, max_clients: int = 1024) -> Flask:
    """The Flask app, for :class:`_Gateway`, which lets it read and write without copies.

    Args:
        dispatcher: Where messages go.
        token: The run's secret, expected as ``Authorization: Bearer``.
        max_clients: Bound of clients, each of which may cost one buffer.
    """
    from flask import Flask, Response, request

    app = Flask("sparkdl.parameter_server", static_folder=None)
    limits, service = dispatcher.limits, dispatcher.service
    clients = _Clients(dispatcher, max_clients, service.idle_s)

    def refuse(status: int, error: SparkDLError) -> Response:
        response = Response(str(error) + "\n", status, mimetype="text/plain")
        response.headers["Connection"] = "close"  # the request's body may be unread
        return response

    @app.get("/health")
    def health() -> Response:
        return Response("ok\n", mimetype="text/plain")

    @app.get("/metrics")
    def metrics() -> Response:
        lines: list[str] = []
        for metric in service.metrics():
            name = f"sparkdl_ps_{metric.name}"
            number = int(metric.value) if metric.value == int(metric.value) else metric.value
            lines += [
                f"# HELP {name} {metric.help}",
                f"# TYPE {name} {metric.kind}",
                f"{name} {number}",
            ]
        return Response("\n".join(lines) + "\n", content_type="text/plain; version=0.0.4")

    @app.post(FRAME_PATH)
    def frame() -> Response:
        if not has_token(request.headers.get("Authorization", ""), token):
            return refuse(401, AuthenticationError("a wrong or missing bearer token"))
        if "chunked" in request.headers.get("Transfer-Encoding", "").lower():
            return refuse(411, ProtocolError("a chunked request", expected="a Content-Length"))
        length = request.content_length
        if length is None or not HEADER_BYTES <= length <= limits.max_frame_bytes:
            return refuse(
                413,
                ProtocolError(
                    "the frame's size is out of bounds",
                    expected=f"Content-Length of {HEADER_BYTES} .. {limits.max_frame_bytes}",
                    received=str(length),
                ),
            )
        client = request.headers.get(CLIENT_HEADER, "")
        if not 8 <= len(client) <= 64:
            return refuse(400, ProtocolError(f"no {CLIENT_HEADER} header"))
        environ = request.environ
        read: Reader = environ["sparkdl.read"]
        try:
            message, meta_len, body_len = read_head(read, limits)
            if HEADER_BYTES + meta_len + body_len != length:
                raise ProtocolError(
                    "Content-Length and the frame's sizes differ",
                    expected=str(HEADER_BYTES + meta_len + body_len),
                    received=str(length),
                )
            message.meta = read_meta(read, message.kind, meta_len)
            number, busy = clients.find(client)
        except ProtocolError as error:
            return refuse(400, error)
        if message.kind is Kind.HEARTBEAT:  # may overtake the client's outstanding request
            return _respond(dispatcher.answer(number, message), limits)
        if not busy.acquire(timeout=5.0):
            return refuse(BUSY, ProtocolError("this client has an outstanding request"))
        try:
            if body_len:
                message.body = service.buffer(number)[:body_len]
                read(message.body.data)
            tcp: socket.socket = environ["sparkdl.socket"]
            reply = dispatcher.call(number, message, lambda: is_connected(tcp))
        except BaseException:
            busy.release()
            raise
        if message.kind is Kind.BYE:
            clients.forget(client)
        if reply is None:
            busy.release()
            return refuse(503, TransportError("the server ends"))
        return _respond(reply, limits, busy.release)

    return app


def has_token(authorization: str, token: str) -> bool:
    """Whether an ``Authorization`` header is the bearer of the run's token."""
    scheme, _, shown = authorization.strip().partition(" ")
    return scheme.lower() == "bearer" and token_matches(shown.strip(), token)


def _respond(reply: Message, limits: Limits, done: Callable[[], None] | None = None) -> Response:
    from flask import Response

    try:
        head = encode(reply, max_meta_bytes=limits.max_meta_bytes)
    except ProtocolError as error:
        reply = Message(Kind.ERROR, meta=error_to_meta(error))
        head = encode(reply, max_meta_bytes=limits.max_meta_bytes)
    parts = _ReplyBody(head, reply, done)
    response = Response(parts, mimetype="application/octet-stream", direct_passthrough=True)
    response.content_length = len(head) + reply.body_bytes
    return response


class _ReplyBody:
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


# -------------------------------------------------------------------- server


class _Gateway(wsgi.Gateway_10):
    """cheroot's gateway with two short cuts past its Python-level buffers."""

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
            buffered = len(reader._read_buf) - reader._read_pos
            chunk = reader.read(min(len(view), buffered))
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

    def start_response(self, *arguments: Any) -> Any:
        # cheroot would read an unread body, of any size, to its end; a chunked one has no known end
        if getattr(self.req.rfile, "remaining", True):
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


class _TunedConnection(HTTPConnection):
    """A connection whose small responses leave at once, and whose silence is bounded."""

    def __init__(self, server: Any, sock: socket.socket, *arguments: Any) -> None:
        super().__init__(server, sock, *arguments)
        tune(sock)  # not every kernel hands TCP_NODELAY on from the listener
        sock.settimeout(IO_TIMEOUT_S)  # within a request; between requests the server's applies


class _FirstRequest:
    """A stranger whose first request must have the token, or ask for what is open to all.

    The request stays in the socket, for cheroot to read.

    Args:
        connection: Accepted; does not block.
        token: The run's secret.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self._token = token

    def hear(self) -> bool:
        """Looks at what has come; True once the headers are whole and good.

        Raises:
            EOFError: The peer is gone.
            ProtocolError: The headers are too large.
            AuthenticationError: There is no token, or another one; the peer has been told.
        """
        try:
            seen = self.connection.recv(MAX_HEADER_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not seen:
            raise EOFError("the peer closed the connection")
        head, end, _ = seen.partition(b"\r\n\r\n")
        if not end:
            if len(seen) < MAX_HEADER_BYTES:
                return False
            raise ProtocolError(
                "the headers of a first request are too large",
                expected=f"at most {MAX_HEADER_BYTES} bytes",
                received=f"{len(seen)} bytes without an end",
            )
        request, *lines = head.decode("latin-1").split("\r\n")
        fields = {
            name.strip().lower(): value for name, _, value in (x.partition(":") for x in lines)
        }
        method, _, path = request.partition(" ")
        open_to_all = method == "GET" and path.split(" ")[0] in ("/health", "/metrics")
        if not open_to_all and not has_token(fields.get("authorization", ""), self._token):
            self.connection.recv(MAX_HEADER_BYTES)
            self.connection.send(_REFUSAL)
            raise AuthenticationError(
                "a wrong or missing bearer token", expected="the token of this run"
            )
        return True


class _Members:
    """What cheroot takes for its listening socket: connections that the greeter has welcomed."""

    def __init__(self, listener: socket.socket) -> None:
        self._name = listener.getsockname()
        self._waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()

    def put(self, stranger: Stranger) -> None:
        """A connection for cheroot."""
        self._waiting.put(stranger.connection)
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
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait().close()
        self._wake.close()
        self._woken.close()


class _Cheroot(wsgi.Server):
    """cheroot on connections that another thread has accepted."""

    keep_alive_conn_limit = 1 << 16
    max_request_header_size = MAX_HEADER_BYTES
    ConnectionClass = _TunedConnection

    def __init__(self, members: _Members, app: Any, num_threads: int) -> None:
        self._members = members
        super().__init__(
            members.getsockname(),
            app,
            numthreads=num_threads,
            server_name="sparkdl",
            request_queue_size=1024,
            timeout=600,
            shutdown_timeout=1,
        )
        self.gateway = _Gateway

    def bind(self, family: int, kind: int, proto: int = 0) -> Any:
        self.socket = self._members
        return self._members

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        logging.getLogger(__name__).log(level, msg, exc_info=traceback)


class HttpServer:
    """Runs the app until closed.

    Args:
        listener: Listening TCP socket; owned from now on.
        dispatcher: Where messages go.
        token: The run's secret.
        num_threads: Requests served at a time. A deferred reply holds a thread, so this must
            exceed the number of workers.
    """

    name = "http"

    def __init__(
        self, listener: socket.socket, dispatcher: Dispatcher, token: str, num_threads: int
    ) -> None:
        app = make_app(dispatcher, token, max_clients=4 * num_threads)
        members = _Members(listener)
        self._server = _Cheroot(members, app, num_threads)
        self._server.prepare()
        self._greeter = Greeter(
            listener, lambda connection: _FirstRequest(connection, token), members.put,
            peeks=True, name="sparkdl-ps-http-greeter",
        )  # fmt: skip
        self._thread = threading.Thread(
            target=self._server.serve, name="sparkdl-ps-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops accepting and ends the threads."""
        self._greeter.close()
        self._server.stop()
        self._thread.join(5)
