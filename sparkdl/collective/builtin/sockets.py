"""Sockets: listening, options, this machine's address, and the error of a connection that ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket

from sparkdl.errors import ResourceError, TransportError


def listen_on(bind_host: str, port: int | tuple[int, int]) -> socket.socket:
    first, last = (port, port) if isinstance(port, int) else port
    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    problem: OSError | None = None
    for candidate in range(first, last + 1):
        try:
            held = socket.create_server((bind_host, candidate), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            problem = error if isinstance(error, OSError) else OSError(str(error))
            continue
        held.setblocking(False)
        return held
    raise ResourceError(
        f"cannot listen on {bind_host or 'any address'}",
        expected=f"a free port from {first} to {last}" if first else "a free port",
        received=str(problem) if problem else "an empty range",
        hint="port=0 takes any free port",
    ) from problem


def own_address() -> str:
    """The address from which this machine reaches other networks; 127.0.0.1 if it reaches none."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def own_host_id() -> str:
    """Equal for processes that can share memory and Unix sockets, different for others.

    The kernel's boot id tells machines apart, the network name space tells apart containers whose
    abstract Unix sockets do not meet. Without either (not Linux) each process is its own host.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return secrets.token_hex(16)


def set_tcp_options(connection: socket.socket) -> None:
    """No delay for small frames; a host that vanished is noticed within about 15 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def peer_gone(rank: int, peer: int, why: object = "") -> TransportError:
    """The error for a connection that ended."""
    return TransportError(
        f"rank {peer} is gone; rank {rank} cannot go on",
        expected="all ranks to stay until the operation is done",
        received=f"the connection to rank {peer} ended" + (f" ({why})" if why else ""),
        hint=f"the cause is on rank {peer}, or on a rank it waited for",
    )
