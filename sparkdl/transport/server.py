"""A service behind its transports, in threads of this process."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from typing import Protocol, Self

from sparkdl.process.closing import Closing
from sparkdl.transport.address import Listeners
from sparkdl.transport.service import Dispatcher, Service
from sparkdl.transport.shm import ShmServer
from sparkdl.transport.socket import StreamServer
from sparkdl.wire.tls import Certificate, ServerEncryption


class _Transport(Protocol):
    def close(self) -> None: ...


class Server(Closing):
    """A service in threads of this process, behind the transports that have a listening socket."""

    def __init__(
        self,
        service: Service,
        token: str,
        listeners: Listeners,
        num_workers: int,
        certificate: Certificate | None = None,
    ) -> None:
        self._token, self._num_workers = token, num_workers
        self._encryption = None if certificate is None else ServerEncryption(certificate)
        self._listeners = listeners
        self._transports: list[_Transport] = []
        self.service = service
        self.address = listeners.address
        self.dispatcher = Dispatcher(service)

    def start(self) -> Self:
        """Starts to answer on all listening sockets."""
        max_connections = 8 * self._num_workers + 32
        sockets = self._listeners.sockets
        if "socket" in sockets:
            tcp, encryption = sockets.pop("socket"), self._encryption
            self._transports.append(
                StreamServer(tcp, self.dispatcher, self._token, max_connections, encryption)
            )
        if "shm" in sockets:
            unix = sockets.pop("shm")
            self._transports.append(ShmServer(unix, self.dispatcher, self._token, max_connections))
        if "http" in sockets:
            web = sockets.pop("http")
            if self.address.mode == "http":
                self._transports.append(self._serve_http(web))
            else:
                self._transports.append(_WhenAsked(web, self._serve_http))
        return self

    def _serve_http(self, listener: socket.socket) -> _Transport:
        from sparkdl.transport.http.server import HttpServer  # Flask's import takes a while

        # one thread per worker's deferred request, plus heartbeats, driver and people
        num_threads = 2 * self._num_workers + 8
        return HttpServer(listener, self.dispatcher, self._token, num_threads, self._encryption)

    def close(self) -> None:
        self.dispatcher.shutdown()
        for transport in reversed(self._transports):
            transport.close()
        self._listeners.close()


class _WhenAsked:
    """A transport that starts when its first connection comes.

    Flask takes as long to import as the rest of the server, at the moment when the workers start
    too; where workers use the other transports nobody may ever ask.
    """

    def __init__(
        self, listener: socket.socket, make: Callable[[socket.socket], _Transport]
    ) -> None:
        self._listener, self._make = listener, make
        self._made: _Transport | None = None
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._wait, name="sparkdl-ps-http", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            woken = selector.register(self._woken, selectors.EVENT_READ)
            if any(key == woken for key, _ in selector.select()):
                return
        self._made = self._make(self._listener)

    def close(self) -> None:
        """Ends the transport, or the wait for its first connection."""
        self._wake.close()
        self._thread.join(5)
        self._woken.close()
        if self._made is None:
            self._listener.close()
        else:
            self._made.close()
