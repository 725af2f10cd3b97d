"""An order of rows that their content alone decides, whatever the order in which they arrived.

Spark brings the rows of a partition in another order each time it shuffles them. Training that is
to be the same each time permutes them from an order of their own::

    key(row) = Σ_j w_j · word_j   mod 2^64

over the 64-bit words of a row, with fixed weights. Rows are sorted by their keys, those with equal
keys by a second one of mixed 32-bit words. Rows that still have equal keys are equal: it makes no
difference which of them is which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.ragged import Array, IndexArray, Ragged, Stored

Keys = npt.NDArray[np.uint64]
_KINDS: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint64, np.uint32, np.uint16, np.uint8)
_CHUNK_WORDS = 1 << 17
"""Words that are widened to 64 bits at a time."""
_TAKEN_BYTES = 1 << 24
"""Of rows with equal keys that are copied at a time."""


def content_order(columns: Sequence[Stored], num_rows: int) -> IndexArray:
    """The numbers of the rows, sorted by what the rows hold.

    Args:
        columns: All columns of the rows, in memory.
        num_rows: How many rows there are.

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
    """Places in the order whose rows have equal keys."""
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
