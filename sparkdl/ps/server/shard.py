"""``ShardConfig``: settings of one shard, as a server's process takes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdl.errors import ConfigError
from sparkdl.ps.server.config import ServerConfig
from sparkdl.ps.shards.cut import Range, ranges_of
from sparkdl.ps.shards.service import ShardService
from sparkdl.ps.shards.tables import TableService
from sparkdl.tables.service import TableSpec
from sparkdl.transport.service import Service
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class TablesOfRun:
    """The tables of a model in a run with servers.

    Args:
        folder: Of their files; servers and driver share it.
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
        place: Of the range, in the flat buffer of the model.
    """

    place: slice = field(default_factory=lambda: slice(0))
    number: int = 0
    count: int = 1
    tables: TablesOfRun | None = None

    @property
    def title(self) -> str:
        """The shard, in messages."""
        return f"parameter server {self.number} of {self.count}"

    def service(self, center: FloatArray) -> Service:
        """The shard; ``center`` is taken over, not copied."""
        range_ = Range(self.place, self.layout)
        tables = None
        if self.tables is not None:
            of = self.tables
            tables = TableService(
                of.specs, self.number, self.count, of.folder, of.reference,
                ignores_nan=of.ignores_nan,
            )  # fmt: skip
        return ShardService(range_, center, self.rule, self.num_workers, self.compression(), tables)


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
