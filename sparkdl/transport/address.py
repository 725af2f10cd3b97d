"""The addresses of a server, and its sockets, which are bound before they are advertised."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from sparkdl.errors import UnknownNameError
from sparkdl.settings.network import PortSpec, ports_of
from sparkdl.wire.hosts import host_id, reachable_host
from sparkdl.wire.listening import listen

Mode = Literal["auto", "http", "socket", "shm"]


@dataclass(frozen=True)
class Address:
    """The addresses of a server; they travel to the workers together with the token.

    Args:
        http: ``http://host:port`` of the Flask app: always there, for /health and /metrics.
        port: Its port; 0 for none.
        uds: Path of the Unix socket; empty for none.
        host_id: Id of the server's host, so that workers know whether they share it.
    """

    http: str
    host: str = ""
    port: int = 0
    uds: str = ""
    host_id: str = ""
    mode: Mode = "auto"


@dataclass(frozen=True)
class Endpoint:
    """A server and the secret of its run: all that a rank needs to connect.

    Args:
        token: The run's secret; no text of this object shows it.
        fingerprint: SHA-256 of the server's certificate; empty where TCP is not encrypted.
    """

    address: Address
    token: str = field(repr=False)
    fingerprint: str = ""


@dataclass(frozen=True)
class ListenOptions:
    """The addresses at which a server listens; checked when built.

    Args:
        mode: ``'http'``, ``'socket'``, ``'shm'``, or ``'auto'`` for all three.
        port: 0 for any free one, a port, or a range (``'7000-7010'``). The framed socket takes it
            where the mode has one, else Flask; both stay inside a range.
        bind_address: Interface to listen on.
        advertised_address: What ranks connect to; None for ``bind_address``.
        web: Whether HTTP listens in every mode, for ``/health`` and ``/metrics``.
    """

    mode: Mode = "auto"
    port: PortSpec = 0
    bind_address: str = "127.0.0.1"
    advertised_address: str | None = None
    web: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UnknownNameError("parameter_server_mode", self.mode, get_args(Mode))
        ports_of(self.port)


class Listeners:
    """Listening sockets by transport, and the address that they make up.

    The process that binds need not be the one that serves: a connection waits in the kernel's
    queue until the server accepts it. So workers may be sent the address while the server's
    process still starts.
    """

    def __init__(self, address: Address, sockets: Mapping[str, socket.socket]) -> None:
        self.address = address
        self.sockets = dict(sockets)

    @classmethod
    def bind(cls, options: ListenOptions, directory: str | None) -> Self:
        """Binds all that the configuration asks for.

        Raises:
            ResourceError: No port is free, or the address is not this host's.
        """
        mode = options.mode
        framed = mode in ("auto", "socket")
        host = options.advertised_address or reachable_host(options.bind_address)
        found: dict[str, Any] = {"host_id": host_id(), "mode": mode}
        sockets: dict[str, socket.socket] = {}
        try:
            if framed:
                sockets["socket"] = tcp = listen(options.bind_address, options.port)
                found.update(host=host, port=tcp.getsockname()[1])
            if mode in ("auto", "shm") and directory and hasattr(socket, "AF_UNIX"):
                path = os.path.join(directory, "ps.sock")
                sockets["shm"] = uds = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                uds.bind(path)
                uds.listen(1024)
                found.update(uds=path)
            if not (options.web or mode == "http"):
                return cls(Address(http="", **found), sockets)
            fixed = framed and len(list(ports_of(options.port))) == 1
            sockets["http"] = web = listen(options.bind_address, 0 if fixed else options.port)
        except BaseException:
            cls(Address(""), sockets).close()
            raise
        literal = f"[{host.strip('[]')}]" if ":" in host else host
        return cls(Address(http=f"http://{literal}:{web.getsockname()[1]}", **found), sockets)

    @classmethod
    def adopt(cls, address: Address, descriptors: Mapping[str, int]) -> Self:
        """The listeners that another process bound and passed on."""
        return cls(address, {name: socket.socket(fileno=fd) for name, fd in descriptors.items()})

    @property
    def descriptors(self) -> dict[str, int]:
        """Transport name -> file descriptor, to be passed on."""
        return {name: listener.fileno() for name, listener in self.sockets.items()}

    def close(self) -> None:
        """Closes this process' handles; may be called twice."""
        for listener in self.sockets.values():
            with contextlib.suppress(OSError):
                listener.close()
        self.sockets.clear()
