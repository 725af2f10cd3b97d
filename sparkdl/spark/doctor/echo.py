"""The listening end of the doctor's probe: what every rank, and the driver, answers to callers.

A caller sends the token and its rank, and then, as often as it wants: a ping, answered with the
clock, or a block of bytes, answered when it is here.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time

from sparkdl.closing import Closing
from sparkdl.errors import AuthenticationError
from sparkdl.network import PortSpec
from sparkdl.wire.exact import receive_exactly
from sparkdl.wire.greeting import Greeter, hear_bytes
from sparkdl.wire.hosts import reachable_host
from sparkdl.wire.listening import listen, tune

TOKEN_BYTES = 32
BLOCK = bytes(1 << 20)
"""What is sent at once to measure a bandwidth."""
PING, BULK = b"P", b"B"
CLOCK = struct.Struct("<d")
HELLO = struct.Struct("<q")


class ProbeCaller:
    """A connection to an :class:`Echo`, which must begin with the token and the caller's rank; for
    a :class:`sparkdl.wire.greeting.Greeter`.

    Args:
        connection: Accepted; does not block.
        token: The secret of this probe.
    """

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self.connection = connection
        self._token = token
        self._heard = bytearray()

    @property
    def rank(self) -> int:
        """Who calls, once all is heard."""
        return int(HELLO.unpack(self._heard[TOKEN_BYTES:])[0])

    def hear(self) -> bool:
        """Reads what has come; True once it is token and rank.

        Raises:
            OSError, EOFError: The peer is gone.
            AuthenticationError: It has another token.
        """
        if not hear_bytes(self.connection, self._heard, TOKEN_BYTES + HELLO.size):
            return False
        if not secrets.compare_digest(self._heard[:TOKEN_BYTES], self._token):
            raise AuthenticationError(
                "a connection without the probe's token",
                expected="the token of this probe",
                received="another one",
            )
        return True

    def turn_away(self) -> None:
        """Nothing to say: a call that ends is a finding of the probe."""


class Echo(Closing):
    """Answers pings with its clock, and takes blocks of bytes; closed at the end of a ``with``.

    A connection begins with the token and the rank of who connects; without the token it is closed.

    Args:
        bind_address: Interface to listen on.
        port: 0 for any free one, a port or a range.
        token: The secret of this probe.
        advertised: What others connect to; None for ``bind_address``, or for an address of this
            host where that is every one, as a server's.

    ``callers`` are the ranks that have connected.

    Raises:
        ResourceError: No port is free, or the address is not this host's.
    """

    def __init__(
        self, bind_address: str, port: PortSpec, token: bytes, advertised: str | None = None
    ) -> None:
        self._listener = listen(bind_address, port)
        self.address: tuple[str, int] = (
            advertised or reachable_host(bind_address), self._listener.getsockname()[1]
        )  # fmt: skip
        self.token = token
        self.callers: set[int] = set()
        self._closed = False
        self._greeter = Greeter(
            self._listener, lambda connection: ProbeCaller(connection, token),
            self._welcome, name="sparkdl-echo-greeter",
        )  # fmt: skip

    def close(self) -> None:
        """Ends the threads."""
        self._closed = True
        self._greeter.close()

    def _welcome(self, caller: ProbeCaller) -> None:
        self.callers.add(caller.rank)
        threading.Thread(
            target=self._serve, args=(caller.connection,), name="sparkdl-echo", daemon=True
        ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            tune(connection)
            connection.settimeout(10.0)
            while not self._closed:
                kind = connection.recv(1)
                if kind == PING:
                    connection.sendall(CLOCK.pack(time.time()))
                elif kind == BULK:
                    receive_exactly(connection, len(BLOCK))
                    connection.sendall(b".")
                else:
                    return
