"""The ways to a server: shared memory, framed socket, HTTP."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from sparkdl.errors import AuthenticationError, TransportError, UnknownNameError
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import BROKEN, Channel, Opener, Timeouts
from sparkdl.transport.frames import ByteArray, FrameLimits
from sparkdl.transport.shm import ShmChannel
from sparkdl.transport.socket import StreamChannel, connect_stream
from sparkdl.wire.greeting import BusyError
from sparkdl.wire.hosts import host_id


@dataclass
class Openers:
    """Ways to reach one server, in the order that the transport tries them.

    All connections that one of these opens are one client to the server: over HTTP, where nothing
    else says so, they share an id, also after a reconnect.
    """

    endpoint: Endpoint
    limits: FrameLimits
    timeout_s: float
    modes: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    client: str = field(default_factory=lambda: secrets.token_hex(16))

    def __call__(self, raw: ByteArray | None) -> Channel:
        last: OSError | EOFError | None = None
        for mode in self.modes:
            try:
                channel = self._open(mode, raw)
            except (AuthenticationError, BusyError):
                raise
            except BROKEN as error:
                self.failures[mode] = str(error)
                last = error
                continue
            self.modes = (mode,)  # stay with what works
            return channel
        raise last or ConnectionRefusedError("no transport to try")

    def _open(self, mode: str, raw: ByteArray | None) -> Channel:
        endpoint, limits = self.endpoint, self.limits
        if mode == "shm":
            address = endpoint.address
            return ShmChannel(address.uds, endpoint.token, limits, raw is not None, self.timeout_s)
        if mode == "socket":
            return StreamChannel(connect_stream(endpoint, limits, self.timeout_s), limits, raw)
        from sparkdl.transport.http.client import HttpChannel

        return HttpChannel(endpoint, limits, raw, self.timeout_s, self.client)


def openers_of(endpoint: Endpoint, mode: str, limits: FrameLimits, timeouts: Timeouts) -> Openers:
    """The ways to ``endpoint`` for a client on this host.

    Raises:
        UnknownNameError: No such transport.
        TransportError: The server has no such transport, or it does not reach this host.
    """
    address = endpoint.address
    usable = {
        "shm": bool(address.uds) and address.host_id == host_id(),
        "socket": bool(address.port),
        "http": bool(address.http),
    }
    if mode != "auto" and mode not in usable:
        raise UnknownNameError("parameter_server_mode", mode, ("auto", *usable))
    modes = tuple(m for m, ok in usable.items() if ok and mode in ("auto", m))
    if mode == "auto" and address.mode != "auto":
        modes = tuple(m for m in modes if m == address.mode)
    if not modes:
        raise TransportError(
            f"the parameter server cannot be reached by mode {mode!r} from here",
            expected="shm: a worker on the server's host; socket, http: a server that has them",
            received=str(address), hint="mode='auto' takes what works",
        )  # fmt: skip
    return Openers(endpoint, limits, timeouts.connect_s, modes)


@contextlib.contextmanager
def explained(opener: Opener, timeouts: Timeouts) -> Iterator[None]:
    """Raises TransportError, with what was tried, where a first connection cannot be opened."""
    try:
        yield
    except (AuthenticationError, BusyError):
        raise
    except BROKEN as error:
        tried = opener.failures if isinstance(opener, Openers) else {"": str(error)}
        raise TransportError(
            "the parameter server cannot be reached",
            expected=f"an open connection within {timeouts.connect_s:g} s",
            received="; ".join(f"{mode}: {text}" for mode, text in tried.items()),
            hint="is the driver's address reachable from the executors? "
            "advertised_address and port ranges help behind NAT and firewalls",
        ) from error
