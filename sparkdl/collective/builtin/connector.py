"""Makes the built-in communicator: opens the sockets, then connects all ranks."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence

from sparkdl.collective.builtin.communicator import BuiltinCommunicator
from sparkdl.collective.builtin.rendezvous import Listener
from sparkdl.collective.communicator import Member
from sparkdl.collective.ordered import DEFAULT_TIMEOUT_S
from sparkdl.errors import ConfigError
from sparkdl.settings.network import PortSpec
from sparkdl.wire import hosts
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.tls import Certificate

_LEAST_TOKEN_BYTES = 16


class BuiltinConnector:
    """Makes the built-in communicator of one rank.

    Args:
        bind_host: Address to listen on, the IPv6 ones have a colon; or a network
            (``'10.0.0.0/8'``) of which this machine has an address; None: the advertised address.
        port: TCP ports to try; see :func:`sparkdl.settings.network.ports_of`.
        advertised_host: Address that the others connect to; None: the one listened on, or, where
            that is every address, the one from which this machine reaches ``towards``.
        towards: A host on the network of the ranks; empty for any other network.
        host_id: Equal for ranks that can share memory; None: that of this machine. Ranks with
            different ids use TCP.

    Raises:
        ResourceError: From :meth:`prepare`: no port is free, or the address is not this machine's.
    """

    def __init__(
        self,
        rank: int,
        *,
        bind_host: str | None = None,
        port: PortSpec = 0,
        advertised_host: str | None = None,
        towards: str = "",
        host_id: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = 60.0,
        certificate: Certificate | None = None,
    ) -> None:
        self._rank, self._certificate = rank, certificate
        self._bind_host, self._port, self._towards = bind_host, port, towards
        self._advertised_host, self._host_id = advertised_host, host_id
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._listener: Listener | None = None

    def prepare(self) -> Member:
        """Opens the listening sockets; returns where they are."""
        self.close()
        bind, advertised = rank_addresses(self._bind_host, self._advertised_host, self._towards)
        self._listener = Listener(bind, self._port)
        return Member(
            host=advertised,
            port=self._listener.port,
            host_id=self._host_id or _shares_memory_as(),
            local=self._listener.local,
            communicator=BuiltinCommunicator.name,
        )

    def connect(self, members: Sequence[Member], token: bytes) -> BuiltinCommunicator:
        """Connects all ranks; see :class:`sparkdl.collective.communicator.Connector`."""
        if self._listener is None:
            raise ConfigError(
                "cannot connect the builtin communicator",
                expected="prepare() before connect()",
                received="connect() without prepare(), or twice",
                hint="call prepare() on all ranks, then connect() with what it returned on each",
            )
        if not 0 <= self._rank < len(members):
            raise ConfigError(
                "cannot connect the builtin communicator",
                expected=f"a member for rank {self._rank}",
                received=f"{len(members)} members",
                hint="members are what prepare() returned on each rank, in rank order",
            )
        if len(token) < _LEAST_TOKEN_BYTES:
            raise ConfigError(
                "cannot connect the builtin communicator",
                expected=f"a token of at least {_LEAST_TOKEN_BYTES} bytes",
                received=f"{len(token)} bytes",
                hint="secrets.token_bytes(32), made once on the driver",
            )
        others = sorted({m.communicator for m in members} - {BuiltinCommunicator.name})
        if others:
            raise ConfigError(
                "cannot connect the builtin communicator",
                expected="all ranks prepared for it",
                received=f"ranks prepared for {', '.join(map(repr, others))}",
                hint="pass the same communicator= on all ranks",
            )
        listener, self._listener = self._listener, None
        try:
            return BuiltinCommunicator(
                self._rank,
                members,
                range(len(members)),
                listener,
                token,
                "world",
                timeout_s=self._timeout_s,
                connect_timeout_s=self._connect_timeout_s,
                certificate=self._certificate,
            )
        except BaseException:
            listener.close()
            raise

    def close(self) -> None:
        """Closes the sockets, unless a communicator uses them. Can be repeated."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _shares_memory_as() -> str:
    """The host's identity; without Linux' shared memory each process is a host of its own."""
    return hosts.host_id() if sys.platform == "linux" else secrets.token_hex(16)
