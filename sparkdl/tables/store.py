"""``RowStore``: the rows of one table that one rank keeps, and their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.settings.values import require_int
from sparkdl.tables.admission import (
    Counts,
    EntryFilter,
    Eviction,
    Mask,
    WaitingIds,
    make_entry_filter,
)
from sparkdl.tables.functions import Statistics, TableFunction
from sparkdl.tables.hashing import Hashes, Ids, mix64
from sparkdl.tables.index import RowIndex, Slots, grown
from sparkdl.tables.rules import RowRule, RowStart, SgdRows, make_row_rule
from sparkdl.weights import FloatArray, is_finite

BLOCK_ROWS = 1 << 14
"""Rows that are copied in one go when a table is written."""

_MOST_LETTERS = 200
_FEW = 16
"""Gradients of one id up to which the first ones of all ids are added, then the second ones."""

Unknown = Literal["zeros", "initial"]


def require_table_name(name: object) -> str:
    """Returns ``name`` if a table, and its folder, can have it; raises ConfigError if not."""
    if isinstance(name, str) and name.strip(".") and len(name) <= _MOST_LETTERS:
        with contextlib.suppress(UnicodeEncodeError):
            if len(quote(name, safe="")) <= _MOST_LETTERS:
                return name
    raise ConfigError(
        "a table cannot have this name, which is that of a folder, too",
        expected=f"a text that is not of dots alone, of at most {_MOST_LETTERS} letters as a path "
        "has them",
        received=repr(name[:100] if isinstance(name, str) else type(name)),
        hint="ServedEmbedding(..., table='ads')",
    )


class TableRows(NamedTuple):
    """Rows of a table, sorted by the hash of their ids.

    ``counts`` (how often a row was seen) and ``clocks`` (the step of its last gradient) are None
    where they are not kept.
    """

    ids: Ids
    values: FloatArray
    state: FloatArray
    counts: Counts | None = None
    clocks: Counts | None = None


class RowStore:
    """Rows by id: an id gets its row at its first gradient.

    Not thread-safe. A push is one step of the clock.

    Args:
        dim: Numbers of a row.
        rule: The step of a row, or its name or settings.
        start: What rows start from, or its name or settings.
        name: The table's name, for start values and messages.
        seed: Seed of the start values.
        entry: Which ids get a row. None: all.
        eviction: Which rows leave. None: none.
        tracks: Whether counts and clocks of rows are kept (8 bytes a row), which :meth:`shrink`
            and ``to_dataframe(since=...)`` need; with an eviction they are.
        on_nan: What happens to a gradient that is not finite: ``'raise'``, or ``'ignore'``, nobody
            looks.
    """

    def __init__(
        self,
        dim: int,
        rule: str | Mapping[str, object] | RowRule = "adagrad",
        start: str | Mapping[str, object] = "uniform",
        *,
        name: str = "table",
        seed: int = 0,
        entry: Mapping[str, object] | EntryFilter | None = None,
        eviction: Eviction | None = None,
        tracks: bool = False,
        on_nan: Literal["raise", "ignore"] = "raise",
    ) -> None:
        dim = require_int(f"the dim of table {name!r}", dim, 1)
        self.name, self.dim, self.on_nan = require_table_name(name), dim, on_nan
        self.rule, self.start = make_row_rule(rule), RowStart(name, dim, start, seed)
        self.entry, self.eviction = make_entry_filter(entry), eviction or Eviction()
        self.clock = 0
        """Pushes so far."""
        self.tracks = tracks or self.eviction.on
        self._index = RowIndex()
        self._values = np.empty((1024, dim), np.float32)
        self._state = np.empty((1024, self.rule.width(dim)), np.float32)
        self._meta = np.zeros((1024 if self.tracks else 0, 2), np.uint32)
        self.waiting = WaitingIds()
        """Ids that were seen too seldom for a row."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self._values, self._state, self._meta)
        return sum(a.nbytes for a in arrays) + self._index.nbytes + self.waiting.nbytes

    @property
    def settings(self) -> dict[str, object]:
        """All that an empty table is made from, as JSON has it; see :meth:`from_settings`."""
        return {
            "name": self.name,
            "dim": self.dim,
            "seed": self.start.seed,
            "rule": self.rule.settings,
            "start": self.start.settings,
            "entry": None if self.entry is None else self.entry.settings,
            "eviction": asdict(self.eviction) if self.eviction.on else None,
            "tracks": self.tracks,
        }

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, object], on_nan: Literal["raise", "ignore"] = "raise"
    ) -> RowStore:
        """An empty store with these :attr:`settings`.

        Raises:
            ConfigError: They are not those of a store.
        """
        options = dict(settings)
        try:
            if isinstance(options.get("eviction"), Mapping):
                options["eviction"] = Eviction(**options["eviction"])  # type: ignore[arg-type]
            return cls(**options, on_nan=on_nan)  # type: ignore[arg-type]
        except (TypeError, KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                "these are not the settings of a table", expected="what RowStore.settings gives",
                received=f"{type(error).__name__}: {error}",
            ) from error  # fmt: skip

    def known(self, ids: Ids) -> Mask:
        """Whether each id has a row."""
        return self._index.find(self._ids(ids)) >= 0

    def pull(self, ids: Ids, create: bool = True, default: Unknown = "zeros") -> FloatArray:
        """The rows of ids, of shape (ids, dim): a copy; see :meth:`look_up`."""
        return self.look_up(ids, create, default)[0]

    def look_up(
        self, ids: Ids, create: bool = True, default: Unknown = "zeros"
    ) -> tuple[FloatArray, Mask]:
        """The rows of ids, and which of them are stored. Nothing is changed.

        Args:
            ids: Any, also one several times.
            create: For training: an id without a row has its start value, or zeros while the
                table's entry filter keeps it out.
            default: Otherwise, what an id without a row has.
        """
        ids = self._ids(ids)
        slots = self._index.find(ids)
        stored = slots >= 0
        rows = self._values.take(slots, axis=0, mode="clip")
        unknown = np.flatnonzero(~stored)
        if len(unknown):
            rows[unknown] = 0
            shown = unknown
            if not create:
                shown = unknown if default == "initial" else unknown[:0]
            elif self.entry is not None:
                missing = ids[unknown]
                seen = self.waiting.seen(missing) + 1
                shown = unknown[self.entry.admitted(missing, seen)]
            if len(shown):
                rows[shown] = self.start.rows(ids[shown])
        return rows, stored

    def push(
        self,
        ids: Ids,
        gradients: FloatArray,
        learning_rate: float,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """One step of the rows of ids, each by its gradient.

        Args:
            ids: Each once; see :func:`merged`.
            gradients: Summed over the duplicates of an id; of shape (ids, dim).
            counts: How often each id was seen, for filters and evictions. None: once.

        Raises:
            DataError: An id is there twice, or the shapes do not fit.
            ModelError: A gradient is not finite, with ``on_nan='raise'``.
        """
        self._step(self.rule, ids, gradients, learning_rate, counts)

    def add(
        self, ids: Ids, changes: FloatArray, counts: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Adds to the rows of ids what another place has trained; their state stays.

        Args:
            ids: Each once.
            changes: Changes of shape (ids, dim).
        """
        self._step(SgdRows(), ids, np.negative(changes), 1.0, counts)

    def slots_of(self, ids: Ids) -> Slots:
        """The place of each id, -1 where it has no row; valid until rows leave."""
        return self._index.find(self._ids(ids))

    def _step(
        self,
        rule: RowRule,
        ids: Ids,
        gradients: FloatArray,
        learning_rate: float,
        counts: npt.NDArray[np.int64] | None,
    ) -> None:
        ids = self._ids(ids)
        gradients = np.asarray(gradients, np.float32)
        if gradients.shape != (len(ids), self.dim):
            raise DataError(
                f"table {self.name!r}: the gradients do not fit the ids",
                expected=f"shape ({len(ids)}, {self.dim})", received=str(gradients.shape),
            )  # fmt: skip
        self._require_once(ids)
        seen = np.ones(len(ids), np.int64) if counts is None else np.asarray(counts, np.int64)
        if self.on_nan != "ignore" and not is_finite(gradients):
            sound = np.isfinite(gradients).all(axis=1)
            raise ModelError(
                f"table {self.name!r}: the gradient of a row is not finite",
                expected="finite gradients",
                received=f"NaN or infinity for id {int(ids[~sound][0])}, "
                f"and for {int((~sound).sum()) - 1} other rows",
                hint="a smaller learning rate",
            )
        self.clock += 1
        slots = self._index.find(ids)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            entering = self._entering(ids, absent, seen)
            if len(entering):
                slots[entering] = self._create(ids[entering])
            if len(entering) < len(absent):
                there = slots >= 0
                slots, gradients, seen = slots[there], gradients[there], seen[there]
        rule.step(self._values, self._state, gradients, learning_rate, slots)
        if self.tracks:
            self._note(slots, seen)
            if self.eviction.on:
                self._evict()

    def make_rows(self, ids: Ids) -> Slots:
        """The places of ids, each once; one without a row gets it, past any entry filter."""
        ids = self._ids(ids)
        slots = self._index.find(ids)
        absent = np.flatnonzero(slots < 0)
        self.reserve(len(self) + len(absent))
        for start in range(0, len(absent), BLOCK_ROWS):
            part = absent[start : start + BLOCK_ROWS]
            slots[part] = self._create(ids[part])
        return slots

    def values_at(self, slots: Slots) -> FloatArray:
        """A copy of the values at some places, of shape (slots, dim)."""
        return self._values.take(slots, axis=0)

    def ids_at(self, slots: Slots) -> Ids:
        """The ids of the rows at some places."""
        return self._index.ids(slots)

    def set_values(self, slots: Slots, values: FloatArray) -> None:
        """Sets the values at some places, of shape (slots, dim); their state stays."""
        self._values[slots] = values

    def step_at(self, slots: Slots, gradients: FloatArray, learning_rate: float) -> None:
        """A step of the rows at some places, which is none of the clock by itself."""
        self.rule.step(self._values, self._state, gradients, learning_rate, slots)

    def slots(self) -> tuple[Slots, Hashes]:
        """The places of all rows, and the hashes of their ids, for
        :func:`sparkdl.tables.index.in_order`."""
        slots = self._index.live()
        return slots, mix64(self._index.ids(slots))

    def rows_at(self, slots: Slots) -> TableRows:
        """A copy of the rows at some of :meth:`slots`."""
        ids, values = self._index.ids(slots), self._values.take(slots, axis=0)
        state = self._state.take(slots, axis=0)
        if self.tracks:
            return TableRows(ids, values, state, self._meta[slots, 0], self._meta[slots, 1])
        return TableRows(ids, values, state)

    def export(self) -> TableRows:
        """All rows, sorted by the hash of their ids."""
        slots, hashes = self.slots()
        return self.rows_at(slots[np.argsort(hashes)])

    def load(
        self,
        ids: Ids,
        values: FloatArray,
        state: FloatArray | None = None,
        counts: Counts | None = None,
        clocks: Counts | None = None,
    ) -> None:
        """Sets rows, those that are there and new ones; no filter keeps any out.

        Args:
            ids: Each once.
            values: Values of shape (ids, dim).
            state: State of the rule, of shape (ids, width). None: that of rows without a step.
            counts: How often each was seen. None: once.
            clocks: The step of the last gradient of each. None: the present one.

        Raises:
            DataError: An id is there twice, or the shapes do not fit.
        """
        ids = self._ids(ids)
        self._require_once(ids)
        width = self._state.shape[1]
        if state is None:
            state = self.rule.start_state(len(ids), self.dim)
        if np.shape(values) != (len(ids), self.dim) or np.shape(state) != (len(ids), width):
            raise DataError(
                f"table {self.name!r}: the rows do not fit",
                expected=f"values ({len(ids)}, {self.dim}), state ({len(ids)}, {width})",
                received=f"values {np.shape(values)}, state {np.shape(state)}",
            )
        slots = self._index.find(ids)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            slots[absent] = self._index.insert(ids[absent])
            self._make_room()
            if len(self.waiting):
                self.waiting.forget(ids[absent])
        self._values[slots], self._state[slots] = values, state
        if self.tracks:
            self._meta[slots, 0] = 1 if counts is None else counts
            self._meta[slots, 1] = self.clock if clocks is None else clocks

    def reserve(self, rows: int) -> None:
        """Makes room for that number of rows at once, which is faster than to grow."""
        self._index.reserve(rows)
        if rows > len(self._values):
            self._resize(rows)

    def shrink(self, *, unseen: int | None = None, below: int | None = None) -> int:
        """Removes rows, and gives their memory back.

        Args:
            unseen: Rows without a gradient for more steps of the clock than that go.
            below: Rows that were seen fewer times go.

        Returns:
            How many rows left.

        Raises:
            ConfigError: The store does not track its rows.
        """
        if not self.tracks:
            raise ConfigError(
                f"table {self.name!r} does not know rows to remove",
                expected="a table that tracks how often and when its rows are seen",
                received="tracks=False", hint="make it with tracks=True: 8 bytes a row",
            )  # fmt: skip
        slots = self._index.live()
        counts, clocks = self._meta[slots, 0], self._meta[slots, 1].astype(np.int64)
        leaves = np.zeros(len(slots), bool)
        if unseen is not None:
            leaves |= self.clock - clocks > unseen
        if below is not None:
            leaves |= counts < below
        self._index.remove(self._index.ids(slots[leaves]))
        moved = self._index.compact()
        for start in range(0, len(moved), BLOCK_ROWS):
            # ascending: none is written before it is read
            part, end = moved[start : start + BLOCK_ROWS], start + BLOCK_ROWS
            self._values[start:end][: len(part)] = self._values[part]
            self._state[start:end][: len(part)] = self._state[part]
            self._meta[start:end][: len(part)] = self._meta[part]
        self._resize(max(1024, len(moved)))
        return int(leaves.sum())

    def apply(self, function: TableFunction) -> int:
        """Changes all rows by a function; their state stays.

        Returns:
            How many rows there are.

        Raises:
            DataError: The function makes no rows.
        """
        slots = self._index.live()
        for start in range(0, len(slots), BLOCK_ROWS):
            part = slots[start : start + BLOCK_ROWS]
            self._values[part] = function.change(self._index.ids(part), self.values_at(part))
        return len(slots)

    def statistics(self) -> Statistics:
        """Numbers about all values."""
        found, slots = Statistics(), self._index.live()
        for start in range(0, len(slots), BLOCK_ROWS):
            part = slots[start : start + BLOCK_ROWS]
            found = found.joined(Statistics.of(self._values.take(part, axis=0)))
        return found

    def _ids(self, ids: Ids) -> Ids:
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.dtype == np.uint64:
            raise DataError(
                f"table {self.name!r}: ids are integers of 64 bits in one row",
                expected="an array of int64 with one axis",
                received=f"{ids.dtype} of shape {ids.shape}",
            )
        return ids.astype(np.int64, copy=False)

    def _require_once(self, ids: Ids) -> None:
        if (ids[1:] > ids[:-1]).all():  # as merged() gives them
            return
        ordered = np.sort(ids)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise DataError(
                f"table {self.name!r}: an id is there twice",
                expected="each id once, with the sum of its gradients",
                received=f"id {int(ordered[1:][twice][0])} several times",
                hint="merged(ids, gradients) sums the gradients of each id",
            )

    def _entering(self, ids: Ids, absent: Slots, seen: npt.NDArray[np.int64]) -> Slots:
        """Which of the absent ids get a row now; the others are counted."""
        if self.entry is None:
            return absent
        missing = ids[absent]
        if not self.entry.counting:
            return absent[self.entry.admitted(missing, seen[absent])]
        counts = self.waiting.seen(missing) + seen[absent]
        enters = self.entry.admitted(missing, counts)
        self.waiting.forget(missing[enters])
        self.waiting.count(missing[~enters], counts[~enters])
        return absent[enters]

    def _create(self, ids: Ids) -> Slots:
        slots = self._index.insert(ids)
        self._make_room()
        self._values[slots] = self.start.rows(ids)
        self._state[slots] = self.rule.start_state(len(ids), self.dim)
        if self.tracks:
            self._meta[slots] = 0
        return slots

    def _make_room(self) -> None:
        if self._index.end > len(self._values):
            self._resize(grown(len(self._values), self._index.end))

    def _resize(self, rows: int) -> None:
        # in place: the system moves large blocks without a copy, and no view is ever given away
        self._values.resize((rows, self.dim), refcheck=False)
        self._state.resize((rows, self._state.shape[1]), refcheck=False)
        if self.tracks:
            self._meta.resize((rows, 2), refcheck=False)

    def _note(self, slots: Slots, seen: npt.NDArray[np.int64]) -> None:
        counts = self._meta[slots, 0].astype(np.int64) + seen
        self._meta[slots, 0] = np.minimum(counts, 2**32 - 1)
        self._meta[slots, 1] = self.clock

    def _evict(self) -> None:
        full = self.eviction.max_rows is not None and len(self) > self.eviction.max_rows
        every = self.eviction.expire_after
        if full or (every is not None and self.clock % max(1, every // 20) == 0):
            slots = self._index.live()
            counts, clocks = self._meta[slots, 0], self._meta[slots, 1]
            leaving = slots[self.eviction.leaving(counts, clocks, self.clock)]
            self._index.remove(self._index.ids(leaving))


def merged(
    ids: Ids, gradients: FloatArray, counts: npt.NDArray[np.int64] | None = None
) -> tuple[Ids, FloatArray, npt.NDArray[np.int64]]:
    """Each id once, the sum of its gradients in their order, and how often it was there.

    Args:
        gradients: Gradients of shape (ids, dim).
        counts: How often each stands for. None: once.
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    if not len(ids):
        return ids, gradients, np.zeros(0, np.int64)
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    repeats = np.diff(first, append=len(ids))
    weights = repeats
    if counts is not None:
        weights = np.add.reduceat(np.asarray(counts, np.int64)[order], first)
    if repeats.max() > _FEW:
        return ordered[first], np.add.reduceat(gradients.take(order, axis=0), first), weights
    sums = gradients.take(order[first], axis=0)
    for number in range(1, int(repeats.max())):
        more = np.flatnonzero(repeats > number)
        sums[more] += gradients.take(order[first[more] + number], axis=0)
    return ordered[first], sums, weights
