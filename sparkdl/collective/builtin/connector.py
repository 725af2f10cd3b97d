"""Makes the built-in communicator: opens the sockets, then connects all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.collective.builtin.communicator import BuiltinCommunicator
from sparkdl.collective.builtin.rendezvous import Listener
from sparkdl.collective.builtin.sockets import own_address, own_host_id
from sparkdl.collective.member import Member
from sparkdl.collective.ordered import DEFAULT_TIMEOUT_S
from sparkdl.errors import ConfigError

_LEAST_TOKEN_BYTES = 16


class BuiltinConnector:
    """Makes the built-in communicator of one rank.

    Args:
        rank: This rank, from 0.
        bind_host: Address to listen on; the IPv6 ones have a colon.
        port: TCP port to listen on; 0: any free one; a pair: the first free one of that range.
        advertised_host: Address that the others connect to; None: that from which this machine
            reaches other networks.
        host_id: Equal for ranks that can share memory; None: that of this machine. Ranks with
            different ids use TCP.
        timeout_s: Limit for one operation.
        connect_timeout_s: Limit for connecting all ranks.
    """

    def __init__(
        self,
        rank: int,
        *,
        bind_host: str = "0.0.0.0",
        port: int | tuple[int, int] = 0,
        advertised_host: str | None = None,
        host_id: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = 60.0,
    ) -> None:
        self._rank = rank
        self._bind_host, self._port = bind_host, port
        self._advertised_host, self._host_id = advertised_host, host_id
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._listener: Listener | None = None

    def prepare(self) -> Member:
        """Opens the listening sockets; returns where they are."""
        self.close()
        self._listener = Listener(self._bind_host, self._port)
        return Member(
            host=self._advertised_host or self._found_host(),
            port=self._listener.port,
            host_id=self._host_id or own_host_id(),
            local=self._listener.local,
            communicator=BuiltinCommunicator.name,
        )

    def _found_host(self) -> str:
        anywhere = self._bind_host in ("", "0.0.0.0", "::")
        return own_address() if anywhere else self._bind_host

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
            )
        except BaseException:
            listener.close()
            raise

    def close(self) -> None:
        """Closes the sockets, unless a communicator uses them. Can be repeated."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
