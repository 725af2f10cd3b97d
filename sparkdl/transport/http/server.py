"""HTTP: a Flask app behind cheroot, which passes ingresses and firewalls that raw TCP does not.

``POST /v1/frame`` takes and answers one frame; ``GET /health`` and ``GET /metrics`` are for people
and Prometheus. HTTP has no connections of its own, so a client names itself by a random id, and
its lease alone says whether it lives. Bodies are read from the socket straight into the client's
buffer, and sent straight from one: two small hooks into cheroot's gateway do that.
"""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkdl.errors import AuthenticationError, ProtocolError, SparkDLError, TransportError
from sparkdl.transport.frames import HEADER_BYTES, FrameLimits, Kind, Message, encode, error_to_meta
from sparkdl.transport.http.client import (
    BUSY,
    CLIENT_HEADER,
    FRAME_PATH,
    Reader,
    read_head,
    read_meta,
)
from sparkdl.transport.http.gateway import (
    ANSWERED,
    OPEN_PER_SECOND,
    Allowance,
    FirstRequest,
    Gateway,
    GreetedServer,
    ReplyBody,
    TunedConnection,
    has_token,
)
from sparkdl.transport.service import Dispatcher
from sparkdl.wire.greeting import BusyError, no_room
from sparkdl.wire.listening import is_connected
from sparkdl.wire.tls import ServerEncryption

if TYPE_CHECKING:
    from flask import Flask, Response


MAX_HEADER_BYTES = 16 << 10
"""Most bytes of a request's head over a connection that has shown the token."""


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
        """The connection of ``client`` and the lock of its one outstanding request.

        Raises:
            BusyError: There are as many clients as may be; those of attempts that have ended are
                among them until they are idle for long.
        """
        now = time.monotonic()
        with self._lock:
            for old in [c for c, t in self._seen.items() if now - t > self._idle_s]:
                number, busy = self._known[old]
                if old != client and not busy.locked():
                    self._drop(old, number)
            if client not in self._known:
                if len(self._known) >= self._max_clients:
                    raise no_room()
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


def make_app(
    dispatcher: Dispatcher, token: str, max_clients: int = 1024, *, encrypted: bool = False
) -> Flask:
    """The Flask app, for :class:`Gateway`, which lets it read and write without copies."""
    from flask import Flask, Response, request

    app = Flask("sparkdl.parameter_server", static_folder=None)
    limits, service = dispatcher.limits, dispatcher.service
    clients = _Clients(dispatcher, max_clients, service.idle_s)

    def refuse(status: int, error: SparkDLError) -> Response:
        return Response(str(error) + "\n", status, mimetype="text/plain")

    def malformed(status: int, what: str, expected: str, received: str) -> Response:
        return refuse(status, ProtocolError(what, expected=expected, received=received))

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
            error = AuthenticationError(
                "a wrong or missing bearer token", expected="the token of this run",
                received="another one, or none",
            )  # fmt: skip
            return refuse(401, error)
        environ = request.environ
        tcp: socket.socket = environ["sparkdl.socket"]
        if encrypted and not isinstance(tcp, ssl.SSLSocket):
            return malformed(403, "a frame without TLS", "TLS after a knock", "plain HTTP")
        if "chunked" in request.headers.get("Transfer-Encoding", "").lower():
            told = "Transfer-Encoding: chunked"
            return malformed(411, "a chunked request", "a Content-Length", told)
        length = request.content_length
        if length is None or not HEADER_BYTES <= length <= limits.max_frame_bytes:
            bounds = f"Content-Length of {HEADER_BYTES} .. {limits.max_frame_bytes}"
            return malformed(413, "the frame's size is out of bounds", bounds, str(length))
        client = request.headers.get(CLIENT_HEADER, "")
        if not 8 <= len(client) <= 64:
            wanted = "8 to 64 characters that name the client"
            return malformed(400, f"no {CLIENT_HEADER} header", wanted, f"{len(client)} characters")
        read: Reader = environ["sparkdl.read"]
        try:
            message, meta_len, body_len = read_head(read, limits)
            if HEADER_BYTES + meta_len + body_len != length:
                raise ProtocolError(
                    "Content-Length and the frame's sizes differ",
                    expected=str(HEADER_BYTES + meta_len + body_len), received=str(length),
                )  # fmt: skip
            message.meta = read_meta(read, message.kind, meta_len)
            number, busy = clients.find(client)
        except ProtocolError as error:
            return refuse(400, error)
        except BusyError as error:
            return refuse(503, error)
        if message.kind in service.beside:  # may overtake the client's outstanding request
            return _respond(dispatcher.answer(number, message), limits)
        if not busy.acquire(timeout=5.0):
            what = "this client has an outstanding request"
            return malformed(BUSY, what, "one request at a time", "a second one")
        try:
            if body_len:
                message.body = service.buffer(number)[:body_len]
                read(message.body.data)
            reply = dispatcher.call(number, message, lambda: is_connected(tcp))
        except BaseException:
            busy.release()
            raise
        if message.kind in service.parting:
            clients.forget(client)
        if reply is None:
            busy.release()
            ends = TransportError(
                "the server ends", expected="a request before the end of the run",
                received="one at its end",
            )  # fmt: skip
            return refuse(503, ends)
        return _respond(reply, limits, busy.release)

    return app


def _respond(
    reply: Message, limits: FrameLimits, done: Callable[[], None] | None = None
) -> Response:
    from flask import Response, request

    request.environ[ANSWERED] = True
    try:
        head = encode(reply, max_meta_bytes=limits.max_meta_bytes)
    except ProtocolError as error:
        reply = Message(Kind.ERROR, meta=error_to_meta(error))
        head = encode(reply, max_meta_bytes=limits.max_meta_bytes)
    parts = ReplyBody(head, reply, done)
    response = Response(parts, mimetype="application/octet-stream", direct_passthrough=True)
    response.content_length = len(head) + reply.body_bytes
    return response


class HttpServer(GreetedServer):
    """Runs the app until closed."""

    keep_alive_conn_limit = 1 << 16
    max_request_header_size = MAX_HEADER_BYTES
    ConnectionClass = TunedConnection
    gateway_kind = Gateway

    def __init__(
        self,
        listener: socket.socket,
        dispatcher: Dispatcher,
        token: str,
        num_threads: int,
        encryption: ServerEncryption | None = None,
    ) -> None:
        encrypted = encryption is not None
        app = make_app(dispatcher, token, max_clients=4 * num_threads, encrypted=encrypted)
        allowance = Allowance(OPEN_PER_SECOND)
        super().__init__(
            listener, app, lambda tcp: FirstRequest(tcp, token, encrypted, allowance),
            name="sparkdl-ps-http", encryption=encryption,
            peeks=lambda stranger: not stranger.knocks, numthreads=num_threads,
            request_queue_size=1024, timeout=600, shutdown_timeout=1,
        )  # fmt: skip

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        if isinstance(sys.exception(), OSError):  # a connection broke: its client tries again
            level, traceback = logging.DEBUG, False
        logging.getLogger(__name__).log(level, msg, exc_info=traceback)
