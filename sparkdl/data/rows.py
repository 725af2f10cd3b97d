"""Rows by number, in memory or spilled to disk; batches are gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.columns import Array, Batch, ColumnSpec, DataSpec, IndexArray, Ragged, Stored
from sparkdl.data.storage import MemoryStorage, Storage
from sparkdl.errors import DataError

Keys = npt.NDArray[np.uint64]
_KINDS: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint64, np.uint32, np.uint16, np.uint8)
_CHUNK_WORDS = 1 << 17
"""Words that are widened to 64 bits at a time."""
_TAKEN_BYTES = 1 << 24
"""Bytes of rows with equal keys that are copied at a time."""


def content_order(columns: Sequence[Stored], num_rows: int) -> IndexArray:
    """The numbers of the rows, sorted by what the rows hold.

    Args:
        columns: All columns of the rows, in memory.

    >>> forward = np.array([[3.0], [1.0], [2.0]])
    >>> backward = forward[::-1].copy()
    >>> a, b = content_order([forward], 3), content_order([backward], 3)
    >>> bool((forward[a] == backward[b]).all())
    True
    """
    keys = _sum_of(columns, num_rows, _first_key)
    order: IndexArray = np.argsort(keys)
    places = _tied(keys, order)
    if len(places):
        rows = order[places]
        second = np.empty(len(rows), np.uint64)
        step = max(1, _TAKEN_BYTES * num_rows // max(1, sum(c.nbytes for c in columns)))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            taken = [c.take(some) if isinstance(c, Ragged) else c[some] for c in columns]
            second[start : start + step] = _sum_of(taken, len(some), _second_key)
        order[places] = rows[np.lexsort((second, keys[rows]))]
    return order


def _tied(keys: Keys, order: IndexArray) -> IndexArray:
    same = np.zeros(len(order) + 1, np.bool_)  # whether the row at a place equals the one before
    for start in range(1, len(order), _CHUNK_WORDS):
        stop = min(start + _CHUNK_WORDS, len(order))
        near = keys[order[start - 1 : stop]]
        same[start:stop] = near[1:] == near[:-1]
    return np.flatnonzero(same[:-1] | same[1:])


def _sum_of(columns: Sequence[Stored], num_rows: int, key: Callable[[Stored, int], Keys]) -> Keys:
    total = np.zeros(num_rows, np.uint64)
    for number, column in enumerate(columns):
        total += key(column, number)
    return total


def _first_key(column: Stored, number: int) -> Keys:
    if isinstance(column, Ragged):
        return _ragged_key(column, 2 * number)
    words = _words(column, len(column), 8)
    weights = _weights(2 * number, words.shape[1])
    if words.dtype == np.uint64:
        return np.asarray(words @ weights, np.uint64)
    return _by_chunks(words, weights, lambda part: part.astype(np.uint64))


def _second_key(column: Stored, number: int) -> Keys:
    if isinstance(column, Ragged):
        return _ragged_key(column, 2 * number + 1)
    words = _words(column, len(column), 4)
    return _by_chunks(words, _weights(2 * number + 1, words.shape[1]), _mixed)


def _ragged_key(column: Ragged, salt: int) -> Keys:
    """The same sum over the positions of each row, and over its length."""
    words = _words(column.values, len(column.values), 4)
    width = words.shape[1]
    weights = _weights(salt, 1 + width * int(column.lengths.max(initial=0)))
    keys = column.lengths.astype(np.uint64) * weights[0]
    starts = column.starts
    begin = 0
    while begin < len(column):
        most = starts[begin] + _CHUNK_WORDS // max(width, 1)
        end = max(begin + 1, int(np.searchsorted(starts, most, side="right")) - 1)
        first, last = starts[begin], starts[end]
        within = np.arange(first, last) - np.repeat(starts[begin:end], column.lengths[begin:end])
        places = 1 + within[:, None] * width + np.arange(width)
        sums = (_mixed(words[first:last]) * weights[places]).sum(axis=1)
        until = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sums, dtype=np.uint64)])
        edges = starts[begin : end + 1] - first
        keys[begin:end] += until[edges[1:]] - until[edges[:-1]]
        begin = end
    return np.asarray(keys, np.uint64)


def _words(column: Array, num_rows: int, most_bytes: int) -> Array:
    """Each row's bytes as words, as wide as divides a row, and no wider than ``most_bytes``."""
    if not column.size:
        return np.zeros((num_rows, 0), np.uint64)
    flat = np.ascontiguousarray(column).reshape(num_rows, -1)
    row_bytes = flat.shape[1] * flat.dtype.itemsize
    sizes = {np.dtype(kind).itemsize: kind for kind in _KINDS}
    kind = next(k for size, k in sizes.items() if size <= most_bytes and row_bytes % size == 0)
    return flat.view(np.uint8).view(kind)


def _by_chunks(words: Array, weights: Keys, widened: Callable[[Array], Keys]) -> Keys:
    keys = np.empty(len(words), np.uint64)
    step = max(1, _CHUNK_WORDS // max(words.shape[1], 1))
    for start in range(0, len(words), step):
        part = slice(start, start + step)
        keys[part] = widened(words[part]) @ weights
    return keys


def _mixed(words: Array) -> Keys:
    """Words of 64 bits in which each bit of a narrower one has its part."""
    mixed = (words.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _weights(salt: int, count: int) -> Keys:
    """Fixed odd numbers that look random (SplitMix64, Steele, Lea and Flood, 2014)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64((salt + 1) * 0xD1342543DE82EF95 % 2**64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((state ^ (state >> np.uint64(31))) | np.uint64(1), np.uint64)


_SCAN_BYTES = 1 << 22
AnyArray = npt.NDArray[np.generic]


class Rows:
    """A fixed number of rows with random access.

    Reading is thread-safe. Arrays from ``slice`` may alias the storage: treat them as read-only.
    Arrays from ``take`` are new.

    Args:
        storage: One column per ``spec.entries``, in that order.
        name: What the rows are, for error messages: ``'training'`` or ``'validation'``.
        order: Their numbers in an order that does not depend on how they came; None: not known.
    """

    def __init__(
        self,
        spec: DataSpec,
        storage: Storage,
        name: str = "training",
        order: IndexArray | None = None,
    ) -> None:
        self.spec, self.name, self.order = spec, name, order
        self._entries = spec.entries
        self._storage: Storage | None = storage
        self.num_rows = storage.num_rows

    def __len__(self) -> int:
        return self.num_rows

    @property
    def storage(self) -> Storage:
        """The storage.

        Raises:
            DataError: The rows are closed.
        """
        if self._storage is None:
            raise DataError(
                f"the {self.name} rows are closed", expected="rows that are still open",
                received="a read after close()",
                hint="finish the epoch before the partition is closed",
            )  # fmt: skip
        return self._storage

    def find_order(self) -> None:
        """Sets ``order`` by the content of the rows, once; rows on disk are left as they came."""
        if self.order is None and isinstance(self.storage, MemoryStorage):
            self.order = content_order(self.storage.columns, self.num_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as the model gets it; 0 without rows."""
        first = self.slice(0, 1)
        if not first.num_rows:
            return 0
        arrays = (*first.x.values(), *first.y.values(), *(first.sample_weight or {}).values())
        return sum(array.nbytes for array in arrays)

    def take(self, indices: npt.ArrayLike) -> Batch:
        """The rows at ``indices``, in that order, as new arrays."""
        index: IndexArray = np.asarray(indices, np.int64)
        if index.size and (index.min() < 0 or index.max() >= self.num_rows):
            raise DataError(
                f"row numbers outside of the {self.name} rows",
                expected=f"numbers in [0, {self.num_rows})",
                received=f"numbers in [{index.min()}, {index.max()}]",
            )
        storage = self.storage
        arrays = [e.finish(storage.gather(i, index)) for i, e in enumerate(self._entries)]
        return self.spec.assemble(arrays, len(index))

    def slice(self, start: int, stop: int) -> Batch:
        """The rows from ``start`` to ``stop`` in their order, without a copy where possible."""
        start, stop, _ = slice(start, stop).indices(self.num_rows)
        stop = max(start, stop)
        storage = self.storage
        arrays = [e.finish(storage.slice(i, start, stop)) for i, e in enumerate(self._entries)]
        return self.spec.assemble(arrays, stop - start)

    def groups(self) -> AnyArray | None:
        """The number of each row's group; None without groups."""
        group = self.spec.group
        if group is None:
            return None
        stored = self.storage.slice(self._entries.index(group), 0, self.num_rows)
        assert not isinstance(stored, Ragged)
        return stored

    def sample(self, spec: ColumnSpec, most_rows: int, most_values: int) -> AnyArray | None:
        """Stored values of a column in some rows, evenly spread over all.

        Args:
            spec: One of the column specs of :attr:`spec`.
            most_rows: No more rows than that.
            most_values: Fewer rows where they have more values than that together, but one.

        Returns:
            An array whose first dimension is the rows; None for no rows, and for a column without
            values or with rows of different length.
        """
        entry = self._entries.index(spec)
        first = self.storage.slice(entry, 0, 1)
        if isinstance(first, Ragged) or not first.size:
            return None
        count = min(self.num_rows, most_rows, max(1, most_values // first.size))
        spread = np.linspace(0, self.num_rows - 1, count).astype(np.int64)
        stored = self.storage.gather(entry, spread)
        assert not isinstance(stored, Ragged)
        return stored

    def check_finite(self) -> None:
        """Raises DataError with the column and the first row that holds NaN or infinity."""
        storage = self.storage
        for i, entry in enumerate(self._entries):
            probe = storage.slice(i, 0, min(1, self.num_rows))
            kind = probe.values.dtype.kind if isinstance(probe, Ragged) else probe.dtype.kind
            if kind not in "fc":
                continue
            step = max(1, _SCAN_BYTES // max(probe.nbytes, 1))
            for start in range(0, self.num_rows, step):
                part = storage.slice(i, start, min(start + step, self.num_rows))
                if isinstance(part, Ragged):
                    part = entry.finish(part)
                finite = np.isfinite(part)
                if not finite.all():
                    raise self._not_finite(entry, finite, part, start)

    def _not_finite(
        self, entry: ColumnSpec, finite: npt.NDArray[np.bool_], part: npt.NDArray[np.float64],
        start: int,
    ) -> DataError:  # fmt: skip
        where = np.unravel_index(int(np.argmin(finite)), finite.shape)
        return DataError(
            f"column {entry.label}, {self.name} row {start + int(where[0])} of the partition: "
            "a value that is not finite",
            expected="finite numbers",
            received=f"{part[where]} at position {tuple(int(w) for w in where[1:])} of the row",
            hint="clean the column, e.g. df.filter(~isnan(...)); a double may overflow as float32",
        )

    def close(self) -> None:
        """Frees the memory or the spilled file; arrays that were handed out stay valid."""
        self._storage = None


_MOST_ROWS, _MOST_NUMBERS = 256, 1 << 18
"""Rows and numbers of an input that are looked at, evenly spread."""


def off_center(rows: Rows) -> dict[str, float]:
    """The part of each input's mean square that its mean makes up.

    Returns:
        Input name -> a number in [0, 1]: 0 for inputs with mean 0, 0.75 for numbers uniform in
        [0, 1), 1 for constants. 0 where nothing is known: no rows, or inputs that are whole
        numbers, text or of different lengths.
    """
    features = rows.spec.features
    return {
        name: _of_input(rows, spec) if rows.num_rows else 0.0 for name, spec in features.items()
    }


def _of_input(rows: Rows, spec: ColumnSpec) -> float:
    if "float" not in spec.dtype:
        return 0.0
    stored = rows.sample(spec, _MOST_ROWS, _MOST_NUMBERS)
    if stored is None or len(stored) < 2 or stored.dtype.kind not in "fiu":
        return 0.0
    count = len(stored)
    values = stored.reshape(count, -1).astype(np.float64)
    mean_square = float(np.square(values).sum(1).mean())
    if not 0 < mean_square < np.inf:
        return 0.0
    # the mean of a few rows is off by chance: by that part of what is left without it
    found = float(np.square(values.mean(0)).sum()) / mean_square
    return max(0.0, (count * found - 1) / (count - 1))


MOST_LOOKED_AT, MOST_VALUES = 1 << 14, 1000
"""At most this many label values are sampled, from evenly spread rows (images have many each). A
label with more values or classes than ``MOST_VALUES`` is not sampled."""


def label_mean(rows: Rows) -> tuple[float, ...]:
    """The mean label of some rows, of a model with one output and without sample weights.

    Returns:
        For class numbers, given as such or as one-hot vectors: the part of the labels that each
        class has. For other labels: the mean of each value along their last axis. Empty where
        there is no such mean: no rows, several outputs, weights, text, too many values.
    """
    if len(rows.spec.labels) != 1 or rows.spec.weights or not rows.num_rows:
        return ()
    (spec,) = rows.spec.labels.values()
    stored = rows.sample(spec, rows.num_rows, MOST_LOOKED_AT)
    if stored is None:
        return ()
    classes = spec.num_classes
    if classes is not None:
        if classes > MOST_VALUES:
            return ()
        labels = stored.ravel().astype(np.int64)
        labels = labels if spec.ignored is None else labels[labels != spec.ignored]
        if not labels.size:
            return ()
        return tuple((np.bincount(labels, minlength=classes) / labels.size).tolist())
    values = stored.reshape(len(stored), -1) if stored.ndim < 2 else stored
    if values.shape[-1] > MOST_VALUES:
        return ()
    return tuple(values.reshape(-1, values.shape[-1]).mean(0, dtype=np.float64).tolist())
