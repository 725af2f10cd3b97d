"""Listening sockets, ports, and the options that every connection gets."""

from __future__ import annotations

import contextlib
import errno
import hmac
import select
import socket
from typing import Protocol

import numpy as np

from sparkdl.errors import ResourceError
from sparkdl.settings.network import PortSpec, ports_of


class ReceivesInto(Protocol):
    """The source of bytes: a socket, or TLS of our own above one."""

    def recv_into(self, memory: memoryview, /) -> int:
        """Receives some bytes; 0 at the end."""


def receive_into(connection: ReceivesInto, view: memoryview) -> None:
    """Fills ``view``.

    Raises:
        EOFError: The peer closed before it was full.
    """
    position, size = 0, len(view)
    while position < size:
        count = connection.recv_into(view[position:])
        if count == 0:
            raise EOFError("the peer closed the connection")
        position += count


def receive_exactly(connection: ReceivesInto, size: int) -> memoryview:
    """``size`` bytes in memory of their own.

    Raises:
        EOFError: The peer closed before.
    """
    memory = memoryview(np.empty(size, np.uint8).data)
    receive_into(connection, memory)
    return memory


def token_matches(received: object, token: str) -> bool:
    """Compares in constant time; anything but a str is wrong."""
    return isinstance(received, str) and hmac.compare_digest(
        received.encode(errors="surrogatepass"), token.encode()
    )


def listen(bind_address: str, spec: PortSpec) -> socket.socket:
    """A listening TCP socket on the first free port of ``spec``; IPv4 or IPv6.

    Raises:
        ResourceError: No port of ``spec`` is free, or the address is not this host's.
    """
    host = bind_address.strip("[]")
    last: OSError | None = None
    for port in ports_of(spec):
        try:
            info = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise ResourceError(
                f"cannot resolve bind_address {bind_address!r}",
                expected="an address or a name of this host", received=str(error),
            ) from error  # fmt: skip
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(info[4])
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            last = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    raise ResourceError(
        f"cannot listen on {bind_address!r}, port {spec!r}",
        expected="a free port on an address of this host",
        received=str(last),
        hint="port=0 takes any free one, and a range such as '7000-7010' its first free one; each "
        "process of a host needs one of its own",
    )


def tune(connection: socket.socket, *, silence_ms: int = 120_000) -> None:
    """No delays for small frames; the end of a host that vanished is noticed.

    Args:
        connection: TCP; one of another kind stays as it is.
        silence_ms: How long a peer may acknowledge nothing. A peer that is busy and takes no bytes
            counts as well. 0: for as long as the kernel tries, a quarter of an hour, and only where
            bytes are on their way; without any a vanished host is noticed within 14 s then.
    """
    with contextlib.suppress(OSError):  # a Unix socket has none of these
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", silence_ms),
        ):  # fmt: skip
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_connected(connection: socket.socket) -> bool:
    """False once the peer has closed; to be asked while no bytes are expected from it."""
    poller = select.poll()  # select() fails on descriptors above 1023
    try:
        poller.register(connection, select.POLLIN)
        if not poller.poll(0):
            return True
        # of the TCP connection, also where TLS runs over it: its end is not encrypted
        return socket.socket.recv(connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return False


def shut_down(connection: socket.socket) -> None:
    """Ends both directions, which wakes up a thread that waits in the connection."""
    with contextlib.suppress(OSError):
        # TLS sockets would go on unencrypted: their own shutdown() forgets the encryption
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
