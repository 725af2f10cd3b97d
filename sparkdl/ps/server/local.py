"""A server in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from sparkdl.ps.server.config import ServerConfig
from sparkdl.ps.state import ServerState
from sparkdl.ps.transports.address import Address, boot_id
from sparkdl.ps.transports.base import Dispatcher, listen, ports_of
from sparkdl.ps.transports.inproc import InprocChannel
from sparkdl.ps.transports.shm import ShmServer
from sparkdl.ps.transports.socket import SocketServer
from sparkdl.weights import FloatArray


class _Transport(Protocol):
    def close(self) -> None: ...


class Server:
    """A server in this process: state, dispatcher and the transports that the mode asks for.

    Args:
        config: See :class:`ServerConfig`.
        center: Initial weights; taken over, not copied.
        directory: Private directory for the Unix socket; None for no shm transport.
        inproc_only: No sockets at all; clients connect through :meth:`channel`.
    """

    def __init__(
        self,
        config: ServerConfig,
        center: FloatArray,
        directory: str | None = None,
        *,
        inproc_only: bool = False,
    ) -> None:
        self.config = config
        self.state = ServerState(
            config.layout, center, config.rule, config.limits(), config.compression()
        )
        self._transports: list[_Transport] = []
        self._late: list[Callable[[], _Transport]] = []
        self.address = Address("")
        listeners: list[socket.socket] = []
        try:
            if not inproc_only:
                listeners, self.address = self._listen(directory)
            self.dispatcher = Dispatcher(self.state)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise

    def _listen(self, directory: str | None) -> tuple[list[socket.socket], Address]:
        """Binds everything first, so that what is advertised is held."""
        config, mode = self.config, self.config.mode
        framed = mode in ("auto", "socket")
        host = config.advertised_address or _reachable(config.bind_address)
        listeners: list[socket.socket] = []
        address: dict[str, Any] = {"boot_id": boot_id(), "mode": mode}
        max_connections = 8 * config.num_workers + 32
        try:
            if framed:
                tcp = listen(config.bind_address, config.port)
                listeners.append(tcp)
                address.update(host=host, port=tcp.getsockname()[1])
                self._late.append(
                    lambda: SocketServer(tcp, self.dispatcher, config.token, max_connections)
                )
            if mode in ("auto", "shm") and directory and hasattr(socket, "AF_UNIX"):
                path = os.path.join(directory, "ps.sock")
                uds = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listeners.append(uds)
                uds.bind(path)
                uds.listen(1024)
                address.update(uds=path)
                self._late.append(
                    lambda: ShmServer(uds, self.dispatcher, config.token, max_connections)
                )
            fixed = framed and len(list(ports_of(config.port))) == 1
            web = listen(config.bind_address, 0 if fixed else config.port)
            listeners.append(web)
            literal = f"[{host}]" if ":" in host.strip("[]") else host
            address.update(
                http=f"http://{literal.replace('[[', '[').replace(']]', ']')}"
                f":{web.getsockname()[1]}"
            )
            self._late.append(lambda: self._serve_http(web))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return listeners, Address(**address)

    def _serve_http(self, listener: socket.socket) -> _Transport:
        from sparkdl.ps.transports.http import HttpServer  # Flask's import takes a while

        # one thread per worker's deferred request, plus heartbeats, driver and people
        return HttpServer(
            listener, self.dispatcher, self.config.token, 2 * self.config.num_workers + 8
        )

    def start(self) -> Self:
        """Starts to answer on all listening sockets."""
        for make in self._late:
            self._transports.append(make())
        self._late.clear()
        return self

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

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _reachable(bind_address: str) -> str:
    """An address of this host for others, if ``bind_address`` is a wildcard."""
    if bind_address.strip("[]") not in ("", "0.0.0.0", "::"):
        return bind_address.strip("[]")
    family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
    probe = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.connect((probe, 9))  # sends nothing; asks the kernel for the route
            return str(udp.getsockname()[0])
    except OSError:
        return socket.gethostname()
