"""``TableReader``: rows looked up in files, which are mapped and not read as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sparkdl.tables.admission import Mask
from sparkdl.tables.classes import Chunk
from sparkdl.tables.files import TableFiles
from sparkdl.tables.functions import Statistics
from sparkdl.tables.hashing import Hashes, Ids, mix64, signed
from sparkdl.tables.index import Slots, hash_range, owner
from sparkdl.tables.store import BLOCK_ROWS, RowStore, Unknown
from sparkdl.weights import FloatArray


class TableReader:
    """The rows of a table in a folder, for predictions.

    Files of this machine are mapped: memory holds the blocks that were touched. Those elsewhere are
    read as a whole. A pickled reader opens its folder again. The checksums of a block of 16,384
    rows are tested when one of its rows is looked up first, which takes .26 ms for rows of 16
    numbers where the file is in memory (later lookups: 1,000 ids in .76 ms). Thread-safe.

    Args:
        folder: A path or URI.

    Raises:
        ResourceError: It is no table, or its files are not whole.
    """

    def __init__(self, folder: str) -> None:
        self._files = TableFiles(folder)
        store = RowStore.from_settings(self._files.settings)
        self.name, self.dim, self._start = store.name, store.dim, store.start
        ranks = range(self._files.ranks)
        self._ids = [self._files.array(part, "ids") for part in ranks]
        self._values = [self._files.array(part, "values") for part in ranks]
        self._untested = [np.ones(-(-len(ids) // BLOCK_ROWS), bool) for ids in self._ids]

    def __reduce__(self) -> tuple[Any, ...]:
        return TableReader, (self._files.folder,)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def folder(self) -> str:
        """The path or URI."""
        return self._files.folder

    @property
    def parts(self) -> int:
        """Parts of the table: as many as there were ranks."""
        return self._files.ranks

    @property
    def counts(self) -> bool:
        """Whether it is kept how often ids were seen."""
        return RowStore.from_settings(self._files.settings).tracks

    @property
    def step(self) -> int:
        """Steps after which the rows were written; see ``to_dataframe(since=...)``."""
        return self._files.clock

    def statistics(self) -> Statistics:
        """Numbers about all values; ``.get('nrm2')`` and other names that Angel's users know."""
        found = Statistics()
        for chunk in self.chunks(BLOCK_ROWS):
            found = found.joined(Statistics.of(chunk.centers))
        return found

    def pull(self, ids: Ids, default: Unknown = "zeros") -> FloatArray:
        """The rows of ids, of shape (ids, dim); see :meth:`look_up`."""
        return self.look_up(ids, default)[0]

    def look_up(self, ids: Ids, default: Unknown = "zeros") -> tuple[FloatArray, Mask]:
        """The rows of ids, and which of them the table has.

        Args:
            ids: Any, also one several times.
            default: What others have: zeros, or the start value that they had in training.

        Raises:
            DataError: An id is of uint64, and too large for int64.
            ResourceError: The bytes of the rows are not those that were written.
        """
        ids = signed(ids)
        rows, known = np.zeros((len(ids), self.dim), np.float32), np.zeros(len(ids), bool)
        hashes, owners = mix64(ids), owner(ids, self._files.ranks)
        for part in range(self._files.ranks):
            asked = np.flatnonzero(owners == part)
            if not len(asked) or not len(self._ids[part]):
                continue
            places = self._places(part, hashes[asked])
            self._test(part, places // BLOCK_ROWS)
            hits = self._ids[part].take(places, mode="clip") == ids[asked]
            found = asked[hits]
            known[found] = True
            rows[found] = self._values[part][places[hits]]
        if default == "initial":
            unknown = np.flatnonzero(~known)
            rows[unknown] = self._start.rows(ids[unknown])
        return rows, known

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """All rows with their ids, in pieces of at most ``rows``."""
        for number, (ids, values) in enumerate(zip(self._ids, self._values, strict=True)):
            self._test(number, np.arange(len(self._untested[number])))
            for start in range(0, len(ids), rows):
                part = slice(start, start + rows)
                yield Chunk(np.asarray(ids[part], np.int64), np.asarray(values[part], np.float32))

    def _test(self, part: int, blocks: Slots) -> None:
        """Tests the checksums of blocks of a part that were not used before."""
        blocks = np.minimum(blocks, len(self._untested[part]) - 1)
        for block in np.unique(blocks[self._untested[part][blocks]]).tolist():
            for name, array in (("ids", self._ids[part]), ("values", self._values[part])):
                self._files.tested(part, name, block, array)
            self._untested[part][block] = False

    def _places(self, part: int, hashes: Hashes) -> Slots:
        """The place of the first id of a part whose hash is that or more, for each hash.

        Hashes are spread evenly: a place is guessed, guessed again from the hash that is there,
        and looked for in 6 deviations around that. So few pages of the file are touched.
        """
        size, ids = len(self._ids[part]), self._ids[part]
        first, end = hash_range(part, self._files.ranks)
        per_hash = size / (end - first)
        guess = ((hashes - np.uint64(first)).astype(np.float64) * per_hash).astype(np.int64)
        guess = np.minimum(guess, size - 1)
        missed = (hashes - mix64(ids.take(guess))).view(np.int64)
        guess = np.clip(guess + (missed * per_hash).astype(np.int64), 0, size)
        around = int(6 * np.sqrt(3 * np.sqrt(size))) + 16
        low, high = np.maximum(guess - around, 0), np.minimum(guess + around, size)
        places = self._bisected(part, hashes, low, high)
        outside = ((places == low) & (low > 0)) | ((places == high) & (high < size))
        again = np.flatnonzero(outside)
        if len(again):
            whole = np.zeros(len(again), np.int64), np.full(len(again), size)
            places[again] = self._bisected(part, hashes[again], *whole)
        return places

    def _bisected(self, part: int, hashes: Hashes, low: Slots, high: Slots) -> Slots:
        low, high, ids = low.copy(), high.copy(), self._ids[part]
        for _ in range(int((high - low).max()).bit_length()):
            middle = (low + high) >> 1
            less = (mix64(ids.take(middle, mode="clip")) < hashes) & (low < high)
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
        return low
