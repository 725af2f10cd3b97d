"""A server in this process."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from sparkdl.ps.server.config import ServerConfig
from sparkdl.ps.state import ServerState
from sparkdl.testing.inproc import InprocChannel
from sparkdl.transport.address import Address
from sparkdl.transport.dispatcher import Dispatcher
from sparkdl.transport.listeners import Listeners
from sparkdl.transport.shm import ShmServer
from sparkdl.transport.socket import SocketServer
from sparkdl.weights import FloatArray


class _Transport(Protocol):
    def close(self) -> None: ...


class Server:
    """A server in this process: state, dispatcher and the transports that the mode asks for.

    Args:
        config: See :class:`ServerConfig`.
        center: Initial weights; taken over, not copied.
        listeners: Sockets to serve, owned from now on; None for none at all: clients connect
            through :meth:`channel`.
    """

    def __init__(
        self, config: ServerConfig, center: FloatArray, listeners: Listeners | None = None
    ) -> None:
        self.config = config
        self._listeners = listeners
        self._transports: list[_Transport] = []
        self.address = Address("") if listeners is None else listeners.address
        try:
            self.state = ServerState(
                config.layout, center, config.rule, config.limits(), config.compression()
            )
            self.dispatcher = Dispatcher(self.state)
        except BaseException:
            if listeners is not None:
                listeners.close()
            raise

    def start(self) -> Self:
        """Starts to answer on all listening sockets."""
        if self._listeners is None:
            return self
        max_connections = 8 * self.config.num_workers + 32
        sockets = self._listeners.sockets
        for name, make in (("socket", SocketServer), ("shm", ShmServer)):
            if name in sockets:
                listener = sockets.pop(name)
                self._transports.append(
                    make(listener, self.dispatcher, self.config.token, max_connections)
                )
        web = sockets.pop("http")
        if self.config.mode == "http":
            self._transports.append(self._serve_http(web))
        else:
            self._transports.append(_WhenAsked(web, self._serve_http))
        return self

    def _serve_http(self, listener: socket.socket) -> _Transport:
        from sparkdl.transport.http_server import HttpServer  # Flask's import takes a while

        # one thread per worker's deferred request, plus heartbeats, driver and people
        return HttpServer(
            listener, self.dispatcher, self.config.token, 2 * self.config.num_workers + 8
        )

    def channel(self, token: str, *, buffer: bool = True) -> InprocChannel:
        """An in-process connection."""
        limits = self.dispatcher.limits
        raw = limits.allocate() if buffer else None
        return InprocChannel(self.dispatcher, token, self.config.token, limits, raw)

    def close(self) -> None:
        """Ends all waits, connections and threads."""
        self.dispatcher.shutdown()
        for transport in reversed(self._transports):
            transport.close()
        if self._listeners is not None:
            self._listeners.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
