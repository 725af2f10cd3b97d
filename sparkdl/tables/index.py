"""From ids to slots, and to the ranks that own them: ranges of hashes, in the order of files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sparkdl.tables.hashing import Hashes, Ids, mix64

Slots = npt.NDArray[np.int64]

_EMPTY, _REMOVED = -1, -2
_HIGHEST_LOAD, _GROWTH = 0.6, 1.5
_BLOCK = 1 << 14
"""Ids that are looked up in one go, so that what NumPy notes of each stays in the cache."""
_FEW, _CELLS = 2048, np.arange(1, 9)
_LOW_BITS, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


class RowIndex:
    """The slot of each id: 0, 1, 2, ... in the order in which ids come, those left first.

    Open addressing with linear probing. Cells hold slots (4 bytes); the id of a slot is kept once,
    in an array by slot. So each number of 64 bits can be an id, and growth needs no second table.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._cells = np.full(64, _EMPTY, np.int32)
        self._used = 0
        """Cells that are not empty: live ones and those of ids that left."""
        self._ids = np.zeros(64, np.int64)
        self.end = 0
        """The slot after the last that was ever given."""
        self._free = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.end - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._cells.nbytes + self._ids.nbytes + self._free.nbytes

    def ids(self, slots: Slots) -> Ids:
        return self._ids.take(slots)

    def live(self) -> Slots:
        """The slots of all ids, ascending."""
        if not len(self._free):
            return np.arange(self.end)
        alive = np.ones(self.end, bool)
        alive[self._free] = False
        return np.flatnonzero(alive)

    def find(self, ids: Ids) -> Slots:
        """The slot of each id, -1 of one that is absent."""
        found = np.empty(len(ids), np.int64)
        for start in range(0, len(ids), _BLOCK):
            part = slice(start, start + _BLOCK)
            found[part] = self._probe(ids[part])[0]
        return found

    def add(self, ids: Ids) -> Slots:
        """The slot of each id; an absent one gets a slot.

        Args:
            ids: Each of them once.
        """
        slots = self.find(ids)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            slots[absent] = self.insert(ids[absent])
        return slots

    def insert(self, ids: Ids) -> Slots:
        """New slots for ids.

        Args:
            ids: Absent ones, each of them once.
        """
        taken = min(len(ids), len(self._free))
        fresh = len(ids) - taken
        if self.end + fresh > np.iinfo(np.int32).max:
            raise MemoryError("one rank keeps at most 2^31 - 1 rows of a table: use more workers")
        kept = len(self._free) - taken
        slots = np.concatenate([self._free[kept:], np.arange(self.end, self.end + fresh)])
        self._free = self._free[:kept].copy()
        self.end += fresh
        if self.end > len(self._ids):
            self._ids.resize(grown(len(self._ids), self.end), refcheck=False)
        self._ids[slots] = ids
        if self._used + len(ids) > _HIGHEST_LOAD * len(self._cells):
            self._rebuild()
        else:
            self._place(slots)
        return slots

    def reserve(self, rows: int) -> None:
        """Makes room for that number of ids at once, which is faster than to grow."""
        cells = int(rows / _HIGHEST_LOAD) + 64
        if cells > len(self._cells):
            self._rebuild(cells)
        if rows > len(self._ids):
            self._ids.resize(rows, refcheck=False)

    def remove(self, ids: Ids) -> Slots:
        """Forgets ids, each of them once; returns their slots, which later ids may get.

        Absent ones are passed over.
        """
        slots, cells = self._probe(ids)
        there = slots >= 0
        gone = slots[there]
        self._cells[cells[there]] = _REMOVED
        self._free = np.concatenate([self._free, gone])
        return gone

    def compact(self) -> Slots:
        """Moves ids to the slots 0, 1, 2, ...; returns the slots that they had, ascending."""
        before = self.live()
        self._ids = self._ids[before]
        self.end, self._free = len(before), np.empty(0, np.int64)
        self._ids.resize(max(64, self.end), refcheck=False)
        self._rebuild()
        return before

    def _home(self, hashes: Hashes) -> Slots:
        size = np.uint64(len(self._cells))
        return (((hashes & _LOW_BITS) * size) >> _SHIFT).astype(np.int64)

    def _probe(self, ids: Ids) -> tuple[Slots, Slots]:
        """Slots of ids (-1 of absent ones), and the cells that hold them."""
        cells = self._home(mix64(ids))
        found = self._cells.take(cells)
        hit = (found >= 0) & (self._ids.take(found, mode="clip") == ids)
        slots = np.where(hit, found, _EMPTY).astype(np.int64)
        open_ = np.flatnonzero(~hit & (found != _EMPTY))
        while len(open_):
            # of few ids several cells at a time: a call of NumPy takes longer than what it does
            wide = _CELLS[: 8 if len(open_) <= _FEW else 1]
            at = cells[open_, None] + wide
            found = self._cells.take(at, mode="wrap")
            hit = (found >= 0) & (self._ids.take(found, mode="clip") == ids[open_, None])
            ends = hit | (found == _EMPTY)
            first = np.arange(len(open_)), ends.argmax(axis=1)
            slots[open_] = np.where(hit[first], found[first], _EMPTY)
            over = ~ends[first]
            cells[open_] = np.where(over, at[:, -1], at[first]) % len(self._cells)
            open_ = open_[over]
        return slots, cells

    def _place(self, slots: Slots) -> None:
        """Writes slots, whose ids are in no cell, into cells."""
        size, empty = len(self._cells), np.int32(_EMPTY)
        self._used += len(slots)
        slots32 = slots.astype(np.int32)
        cells = self._home(mix64(self._ids[slots]))
        while len(slots32):
            free = self._cells.take(cells) == empty
            self._cells[cells[free]] = slots32[free]  # the last that wants it has it
            lost = self._cells.take(cells) != slots32
            slots32, cells = slots32[lost], cells[lost] + 1
            cells[cells == size] = 0

    def _rebuild(self, size: int = 0) -> None:
        """Makes the cells anew, at least ``size`` of them, with room for more."""
        live, size = self.live(), max(size, len(self._cells))
        while len(live) > _HIGHEST_LOAD * size:
            size = int(size * _GROWTH)
        self._cells, self._used = np.full(size, _EMPTY, np.int32), 0
        for start in range(0, len(live), 1 << 20):
            self._place(live[start : start + (1 << 20)])


def grown(rows: int, wanted: int) -> int:
    """How many rows an array gets that has ``rows`` and needs ``wanted``: little more, since memory
    is moved and not copied where the system can do that."""
    return max(wanted, rows + rows // 32 + 1024)


_SORTED_ROWS = 1 << 18
"""Rows that are sorted in one go."""
SEGMENTS = 64
"""Segments of each rank. A rank's rows, sorted by hash, are its segments one after another."""


def segments(hashes: Hashes, ranks: int) -> npt.NDArray[np.int64]:
    """The segment of each hash, below ``64 * ranks``; a larger hash has no smaller segment."""
    parts = (hashes >> _SHIFT) * np.uint64(SEGMENTS * ranks)
    return (parts >> _SHIFT).astype(np.int64)


def owner(ids: Ids, ranks: int) -> npt.NDArray[np.int64]:
    """The rank that owns each id, below ``ranks``."""
    return segments(mix64(ids), ranks) // SEGMENTS


def by_owner(ids: Ids, ranks: int) -> tuple[npt.NDArray[np.intp], list[slice]]:
    """The places of ids, owner by owner, and where those of each owner are among them."""
    if ranks == 1:
        return np.arange(len(ids)), [slice(0, len(ids))]
    owners = owner(ids, ranks)
    short = owners.astype(np.uint16) if ranks <= 1 << 16 else owners  # sorted by radix
    places = np.cumsum(np.bincount(owners, minlength=ranks)).tolist()
    edges = [slice(a, b) for a, b in itertools.pairwise([0, *places])]
    return np.argsort(short, kind="stable"), edges


def hash_range(rank: int, ranks: int) -> tuple[int, int]:
    """The first hash that ``rank`` owns, and the one after its last: up to 2^64."""
    return tuple(-(-(r << 32) // ranks) << 32 for r in (rank, rank + 1))  # type: ignore[return-value]


def in_order(slots: Slots, hashes: Hashes, rows: int) -> Iterator[Slots]:
    """Places of rows in the order of the hashes of their ids, in blocks of ``rows``.

    Sorted is a piece at a time, so that the first block is there soon, and whoever writes a block
    does so while the next piece is sorted.
    """
    coarse = np.argsort((hashes >> np.uint64(48)).astype(np.uint16), kind="stable")  # by radix
    slots, hashes = slots[coarse], hashes[coarse]
    start, rest = 0, slots[:0]
    while start < len(slots):
        end = min(start + _SORTED_ROWS, len(slots))
        if end < len(slots):  # up to where the upper bits of the hashes change
            upper = hashes[end - 1 :] >> np.uint64(48)
            end += int(np.searchsorted(upper[1:], upper[0], "right"))
        piece = np.concatenate([rest, slots[start:end][np.argsort(hashes[start:end])]])
        whole = len(piece) if end == len(slots) else len(piece) // rows * rows
        for first in range(0, whole, rows):
            yield piece[first : first + rows]
        start, rest = end, piece[whole:]
