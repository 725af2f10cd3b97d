"""Settings of a parameter server."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field

from sparkdl.codecs import Codec, Compression
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError
from sparkdl.ps.store import make_store
from sparkdl.rules.rule import Rule
from sparkdl.settings.network import PortSpec
from sparkdl.transport.address import Mode
from sparkdl.transport.listeners import ListenOptions
from sparkdl.transport.service import Service
from sparkdl.weights import FloatArray, Layout
from sparkdl.wire.tls import Certificate


@dataclass(frozen=True)
class ServerConfig:
    """All that a server needs, except the center.

    Args:
        rule: How commits change the center; may be an instance of a user's class.
        mode: ``'http'``, ``'socket'``, ``'shm'``, or ``'auto'`` for all three.
        port: 0 for any free one, a port, or a range (``'7000-7010'``). The framed socket takes it
            where the mode has one, else Flask; both stay inside a range.
        bind_address: Interface to listen on.
        advertised_address: What workers connect to; None for ``bind_address``.
        settings: Time limits; its ``num_workers`` is replaced by the one above. None for defaults.
        token: The run's secret; made up if empty.
        codec: What commits and their replies may be encoded with; None takes no encoded ones.
        certificate: For TLS over TCP; None for no encryption.
        together: All workers begin at the same moment, also where the rule does not ask for it.
        sharded: The values lie on other servers; this one decides for them.
    """

    layout: Layout
    rule: Rule
    num_workers: int
    mode: Mode = "auto"
    port: PortSpec = 0
    bind_address: str = "127.0.0.1"
    advertised_address: str | None = None
    settings: Settings | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    codec: Codec | None = None
    certificate: Certificate | None = None
    together: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        _ = self.listen
        if not isinstance(self.rule, Rule):
            raise ConfigError(
                "the server needs a rule", expected="a Rule", received=type(self.rule).__name__
            )
        self.limits()
        self.compression()

    @property
    def title(self) -> str:
        """The server, in messages."""
        return "the parameter server"

    @property
    def listen(self) -> ListenOptions:
        """The address at which the server listens."""
        return ListenOptions(self.mode, self.port, self.bind_address, self.advertised_address)

    def service(self, center: FloatArray) -> Service:
        """The coordinator with the store; ``center`` is taken over, not copied."""
        return self.coordinator(center)

    def coordinator(self, center: FloatArray) -> Coordinator:
        """The same as :meth:`service`."""
        compression = None if self.sharded else self.compression()
        store = make_store(
            self.layout, center, self.rule, compression,
            together=self.together, sharded=self.sharded,
        )  # fmt: skip
        return Coordinator(self.limits(), store)

    def compression(self) -> Compression | None:
        """The codecs of commits and replies; the workers need equal ones.

        Raises:
            ConfigError: The codec would send more than no compression does.
        """
        if self.codec is None or not self.codec.lossy:
            return None
        return Compression(self.codec, self.layout, self.num_workers)

    def limits(self) -> Settings:
        """The settings, with this configuration's number of workers."""
        given = {} if self.settings is None else asdict(self.settings)
        if self.sharded and given.get("max_state_bytes") is None:
            given["max_state_bytes"] = 8 * self.layout.size_bytes + (64 << 20)
        return Settings(**{**given, "num_workers": self.num_workers})
