"""Which ids get a row (entry filters), and which rows leave (``Eviction``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.settings.values import require_int
from sparkdl.tables.hashing import Ids, mix64
from sparkdl.tables.index import RowIndex, grown

Counts = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EntryFilter(ABC):
    """Which ids get a row. Others have zeros, and their gradients are dropped."""

    name: ClassVar[str]

    @abstractmethod
    def admitted(self, ids: Ids, counts: npt.NDArray[np.int64]) -> Mask:
        """Which ids get a row, by the number of times that each was seen."""

    @property
    def counting(self) -> bool:
        """Whether it has to be known how often each id was seen."""
        return False

    @property
    def settings(self) -> dict[str, object]:
        """Name and constants, as JSON has them."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class CountFilter(EntryFilter):
    """An id gets a row when it was seen ``count`` times (Paddle's CountFilterEntry)."""

    name: ClassVar[str] = "count"
    count: int = 10

    def __post_init__(self) -> None:
        require_int("the count of a CountFilter", self.count, 1)

    def admitted(self, ids: Ids, counts: npt.NDArray[np.int64]) -> Mask:
        return counts >= self.count

    @property
    def counting(self) -> bool:
        return True


@dataclass(frozen=True)
class Probability(EntryFilter):
    """That share of all ids gets rows, the same ids on every rank and in every run (Paddle's
    ProbabilityEntry draws anew each time)."""

    name: ClassVar[str] = "probability"
    probability: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.probability, (int, float)) or not 0 < self.probability <= 1:
            raise ConfigError(
                "Probability is the share of all ids that get rows",
                expected="a number above 0, at most 1", received=repr(self.probability),
            )  # fmt: skip

    def admitted(self, ids: Ids, counts: npt.NDArray[np.int64]) -> Mask:
        # hashed twice, since the first hash says which rank owns the id
        drawn = mix64(mix64(ids)) >> np.uint64(11)
        return drawn < np.uint64(int(self.probability * 2**53))


def make_entry_filter(settings: Mapping[str, object] | EntryFilter | None) -> EntryFilter | None:
    """The filter of such settings; None for None.

    Raises:
        ConfigError: There is no such filter.
    """
    if settings is None or isinstance(settings, EntryFilter):
        return settings
    name = settings.get("name")
    if name == CountFilter.name:
        return CountFilter(int(str(settings["count"])))
    if name == Probability.name:
        return Probability(float(str(settings["probability"])))
    raise UnknownNameError("entry filter", name, (CountFilter.name, Probability.name))


class WaitingIds:
    """How often ids were seen that have no row yet: about 20 bytes each."""

    def __init__(self) -> None:
        self._index = RowIndex()
        self._counts = np.zeros(1024, np.uint32)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._index.nbytes + self._counts.nbytes

    def seen(self, ids: Ids) -> npt.NDArray[np.int64]:
        """How often each was seen."""
        slots = self._index.find(ids)
        return np.where(slots < 0, 0, self._counts.take(slots, mode="clip")).astype(np.int64)

    def count(self, ids: Ids, counts: npt.NDArray[np.int64]) -> None:
        """Notes how many times each of ``ids`` was seen altogether."""
        slots = self._index.add(ids)
        if self._index.end > len(self._counts):
            self._counts.resize(grown(len(self._counts), self._index.end), refcheck=False)
        self._counts[slots] = np.minimum(counts, 2**32 - 1)

    def forget(self, ids: Ids) -> None:
        self._index.remove(ids)

    def export(self) -> tuple[Ids, Counts]:
        """All ids, sorted by hash, and how often each was seen."""
        slots = self._index.live()
        ids = self._index.ids(slots)
        order = np.argsort(mix64(ids))
        return ids[order], self._counts[slots[order]]


@dataclass(frozen=True)
class Eviction:
    """Which rows leave a table. Rows of the step in flight stay.

    Args:
        max_rows: When a rank has more rows, those that are worth least leave, until it has 95 % of
            that. None: no limit.
        expire_after: Steps without a gradient after which a row leaves. None: it stays.
        by: What a row is worth: ``'frequency'``, how often it was seen, and of equal ones the time
            of the last; ``'timestamp'``, that time alone.

    Raises:
        ConfigError: A number below 1, or another word.
    """

    max_rows: int | None = None
    expire_after: int | None = None
    by: Literal["frequency", "timestamp"] = "frequency"

    def __post_init__(self) -> None:
        for name, value in (("max_rows", self.max_rows), ("expire_after", self.expire_after)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{name} of a table is a number of {'rows' if 'rows' in name else 'steps'}",
                    expected="an integer of 1 or more, or None", received=repr(value),
                )  # fmt: skip
        if self.by not in ("frequency", "timestamp"):
            raise UnknownNameError("worth of a row", self.by, ("frequency", "timestamp"))

    @property
    def on(self) -> bool:
        """Whether rows leave at all."""
        return self.max_rows is not None or self.expire_after is not None

    def leaving(self, counts: Counts, clocks: Counts, now: int) -> npt.NDArray[np.int64]:
        """Places of the rows that leave.

        Args:
            counts: How often each row was seen.
            clocks: The step of each row's last gradient.
        """
        idle = now - clocks.astype(np.int64)
        leaves = np.zeros(len(counts), bool)
        if self.expire_after is not None:
            leaves |= idle > self.expire_after
        left = len(counts) - int(leaves.sum())
        if self.max_rows is not None and left > self.max_rows:
            worth = clocks.astype(np.uint64)
            if self.by == "frequency":
                worth |= counts.astype(np.uint64) << np.uint64(32)
            candidates = np.flatnonzero(~leaves & (idle > 0))
            wanted = min(left - int(self.max_rows * 0.95), len(candidates))
            if wanted:
                first = np.argpartition(worth[candidates], wanted - 1)[:wanted]
                leaves[candidates[first]] = True
        return np.flatnonzero(leaves)
