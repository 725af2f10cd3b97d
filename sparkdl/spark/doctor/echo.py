"""The listening end of the doctor's probe: what every rank, and the driver, answers to callers.

A caller proves that it knows the token and says its rank. Then it sends as often as it wants: a
ping, answered with the clock, or a block of bytes, answered when it is here.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time

from sparkdl.process.closing import Closing
from sparkdl.settings.network import PortSpec
from sparkdl.wire.exact import receive_exactly
from sparkdl.wire.greeting import Greeter
from sparkdl.wire.hosts import reachable_host
from sparkdl.wire.listening import listen, tune
from sparkdl.wire.proving import IncomingProof

BLOCK = bytes(1 << 20)
"""The bytes that are sent at once to measure a bandwidth."""
PING, BULK = b"P", b"B"
CLOCK = struct.Struct("<d")
HELLO = struct.Struct("<q")


class Echo(Closing):
    """Answers pings with its clock, and takes blocks of bytes; closed at the end of a ``with``.

    A connection begins with the proof of the token and the rank that connects.

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
            self._listener, lambda connection: IncomingProof(connection, token, HELLO.size),
            self._welcome, name="sparkdl-echo-greeter",
        )  # fmt: skip

    def close(self) -> None:
        """Ends the threads."""
        self._closed = True
        self._greeter.close()

    def _welcome(self, caller: IncomingProof) -> None:
        self.callers.add(int(HELLO.unpack(caller.hello)[0]))
        threading.Thread(
            target=self._serve, args=(caller,), name="sparkdl-echo", daemon=True
        ).start()

    def _serve(self, caller: IncomingProof) -> None:
        connection = caller.connection
        with connection, contextlib.suppress(OSError, EOFError):
            tune(connection)
            connection.settimeout(10.0)
            caller.welcome()
            while not self._closed:
                kind = connection.recv(1)
                if kind == PING:
                    connection.sendall(CLOCK.pack(time.time()))
                elif kind == BULK:
                    receive_exactly(connection, len(BLOCK))
                    connection.sendall(b".")
                else:
                    return
