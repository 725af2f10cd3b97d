"""Settings of the process of a parameter server, or of one of several."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from sparkdl.codecs import Codec, Compression
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError
from sparkdl.ps.kinds import Range, ranges_of
from sparkdl.ps.store import make_store
from sparkdl.rules.rule import Rule
from sparkdl.settings.network import PortSpec
from sparkdl.transport.address import ListenOptions, Mode
from sparkdl.transport.service import Service
from sparkdl.weights import FloatArray, Layout
from sparkdl.wire.tls import Certificate

if TYPE_CHECKING:
    from sparkdl.tables.service import TableSpec


@dataclass(frozen=True)
class ServerConfig:
    """All that a server needs, except the center.

    Args:
        rule: How commits change the center; may be an instance of a user's class.
        mode, port, bind_address, advertised_address: See :class:`ListenOptions`.
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
        return "the parameter server"

    @property
    def listen(self) -> ListenOptions:
        return ListenOptions(self.mode, self.port, self.bind_address, self.advertised_address)

    def service(self, center: FloatArray) -> Service:
        """The coordinator with the store; ``center`` is taken over, not copied."""
        return self.coordinator(center)

    def coordinator(self, center: FloatArray) -> Coordinator:
        """The same as :meth:`service`."""
        store = make_store(
            self.layout, center, self.rule, None if self.sharded else self.compression(),
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


@dataclass(frozen=True)
class TablesOfRun:
    """The tables of a model in a run with servers.

    Args:
        folder: Folder of their files; servers and driver share it.
        reference: A :class:`sparkdl.tables.checkpoints.TableReference` of the rows to begin with;
            empty: there are none.
        ignores_nan: Gradients of rows that are not finite are taken; else they are an error.
    """

    specs: tuple[TableSpec, ...]
    folder: str
    reference: bytes = b""
    ignores_nan: bool = False


@dataclass(frozen=True)
class ShardConfig(ServerConfig):
    """A :class:`ServerConfig` whose layout is that of one range of the model.

    Args:
        place: Place of the range, in the flat buffer of the model.
    """

    place: slice = field(default_factory=lambda: slice(0))
    number: int = 0
    count: int = 1
    tables: TablesOfRun | None = None

    @property
    def title(self) -> str:
        return f"parameter server {self.number} of {self.count}"

    def service(self, center: FloatArray) -> Service:
        from sparkdl.ps.shards import service, tables  # a server of all weights starts without

        range_, rows = Range(self.place, self.layout), None
        if self.tables is not None:
            of = self.tables
            rows = tables.TableService(
                of.specs, self.number, self.count, of.folder, of.reference,
                ignores_nan=of.ignores_nan,
            )  # fmt: skip
        sent = self.compression()
        return service.ShardService(range_, center, self.rule, self.num_workers, sent, rows)


def shards_of(
    config: ServerConfig, count: int, tables: TablesOfRun | None = None
) -> list[ShardConfig]:
    """The settings of the ``count`` servers that share the weights in the run of ``config``, and
    the rows of the model's tables.

    Raises:
        ConfigError: There are more servers than weights, and no tables for those without; or the
            codec sends more for so few weights than no compression would.
    """
    if tables is None and count > max(config.layout.size, 1):
        raise ConfigError(
            "there are more servers than weights",
            expected=f"num_servers of at most {config.layout.size}",
            received=f"num_servers={count}",
        )
    return [
        ShardConfig(
            range_.layout, config.rule, config.num_workers, config.mode, config.port,
            config.bind_address, config.advertised_address, config.settings,
            token=config.token, codec=config.codec, certificate=config.certificate,
            place=range_.place, number=number, count=count, tables=tables,
        )
        for number, range_ in enumerate(ranges_of(config.layout, count))
    ]  # fmt: skip
