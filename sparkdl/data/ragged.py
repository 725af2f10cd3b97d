"""Columns whose rows have different lengths: sequences to be padded, and texts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Padding:
    """How rows of different length become one array, batch by batch.

    Args:
        value: What stands behind the end of a shorter row.
        few_lengths: Round the length of a batch up to a power of two, for frameworks that compile
            the step anew for each length.
        numbers: How many numbers of a flat array are a position; only a mask needs to know.
    """

    value: float = 0.0
    few_lengths: bool = False
    numbers: int = 1

    def length(self, longest: int) -> int:
        """The length of a batch whose longest row has ``longest`` positions; at least 1.

        >>> Padding(few_lengths=True).length(37), Padding().length(37)
        (64, 37)
        """
        longest = max(1, longest)
        return 1 << (longest - 1).bit_length() if self.few_lengths else longest


class Ragged:
    """Rows of different lengths, one after the other in one array.

    Args:
        values: All positions of all rows, ``(positions, ...)``.
        lengths: Positions of each row.
    """

    def __init__(self, values: Array, lengths: IndexArray) -> None:
        self.values, self.lengths = values, lengths
        self._starts: IndexArray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.lengths.nbytes)

    @property
    def starts(self) -> IndexArray:
        """The first position of each row, and behind them the end of the last."""
        if self._starts is None:
            self._starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        return self._starts

    def take(self, indices: IndexArray) -> Ragged:
        """The rows at ``indices``, in that order."""
        lengths = self.lengths[indices]
        ends = np.cumsum(lengths)
        shift = np.repeat(self.starts[indices] - (ends - lengths), lengths)
        return Ragged(self.values[shift + np.arange(len(shift))], lengths)

    def slice(self, start: int, stop: int) -> Ragged:
        """The rows from ``start`` to ``stop``, without a copy."""
        values = self.values[self.starts[start] : self.starts[stop]]
        return Ragged(values, self.lengths[start:stop])

    def padded(self, padding: Padding, dtype: npt.DTypeLike) -> Array:
        """The rows as one array, ``(rows, length, ...)``."""
        width = padding.length(int(self.lengths.max(initial=0)))
        rows = np.full((len(self), width, *self.values.shape[1:]), padding.value, dtype)
        rows[np.arange(width) < self.lengths[:, None]] = self.values
        return rows

    def texts(self) -> Array:
        """The rows, which are texts in UTF-8, as an array of bytes objects."""
        content, starts = self.values.tobytes(), self.starts
        return np.array([content[a:b] for a, b in itertools.pairwise(starts)], object)


Stored = Array | Ragged
"""The rows of a column as they are kept."""
