"""Between cheroot and the app: bodies straight from sockets and to them; member connections."""

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

from sparkdl.transport.frames import Message
from sparkdl.transport.framing import send_reading
from sparkdl.transport.strangers import FirstRequest
from sparkdl.wire.greeting import Greeter, Stranger
from sparkdl.wire.listening import shut_down, tune
from sparkdl.wire.tls import ServerEncryption

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
