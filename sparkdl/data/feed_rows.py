"""A feed's rows as NumPy arrays: column by column, batch by batch, as views where that goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

NO_ROWS = pa.RecordBatch.from_arrays([], names=[])


class UntakenRows:
    """Rows of a record batch that are not taken yet.

    Columns of numbers and of lists of one length become NumPy arrays once, of which batches are
    slices: that costs less than slices of Arrow columns that become arrays.
    """

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.rows, self._at = rows, 0
        self.left = rows.num_rows
        self._views: dict[str, npt.NDArray[Any] | None] | None = None

    def take(self, count: int) -> TakenRows:
        """The next rows, at most ``count``."""
        part = TakenRows(self, self._at, min(count, self.left))
        self._at += part.num_rows
        self.left -= part.num_rows
        return part

    def views(self) -> dict[str, npt.NDArray[Any] | None]:
        """Each column as an array; None where an array of some rows may be another one."""
        if self._views is None:
            columns = zip(self.rows.schema.names, self.rows.columns, strict=True)
            self._views = {name: _view(column) for name, column in columns}
        return self._views


@dataclass(frozen=True)
class TakenRows:
    """Some rows of a record batch."""

    source: UntakenRows
    start: int
    num_rows: int

    def arrow(self) -> pa.RecordBatch:
        """As a record batch."""
        return self.source.rows.slice(self.start, self.num_rows)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As arrays, whose first axis is the rows."""
        end = self.start + self.num_rows
        return {
            name: to_numpy(self.source.rows.column(number).slice(self.start, self.num_rows))
            if view is None
            else view[self.start : end]
            for number, (name, view) in enumerate(self.source.views().items())
        }


def _view(array: pa.Array) -> npt.NDArray[Any] | None:
    """A column of numbers, or of lists of one length of these, without a copy; else None."""
    kind = array.type
    if array.null_count:
        return None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        plain: npt.NDArray[Any] = array.to_numpy()
        return plain
    if pa.types.is_fixed_size_list(kind):
        width = int(kind.list_size)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        found = _one_length(array)
        if found is None:
            return None
        width = found
    else:
        return None
    inner = _view(array.flatten())
    return None if inner is None else inner.reshape(len(array), width, *inner.shape[1:])


def _one_length(array: pa.Array) -> int | None:
    """The length of all lists of a column; None if they differ, or there is none."""
    sizes = array.value_lengths().to_numpy()
    return int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else None


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """A column as one array; lists of unequal length as an array of arrays.

    >>> to_numpy(pa.array([[1, 2], [3, 4]])).shape
    (2, 2)
    """
    if isinstance(array, pa.ChunkedArray):  # combine_chunks copies also where there is one
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists_to_numpy(array)
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        found = np.empty(len(array), object)
        found[:] = array.to_pylist()
        return found
    plain: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return plain


def _lists_to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    inner = to_numpy(array.flatten())
    sizes = np.asarray(array.value_lengths().to_numpy(zero_copy_only=False))
    if not array.null_count and len(sizes) and (sizes == sizes[0]).all():
        return inner.reshape(len(array), int(sizes[0]), *inner.shape[1:])
    found = np.empty(len(array), object)
    ends = np.cumsum(np.nan_to_num(sizes).astype(np.int64))
    valid = array.is_valid().to_pylist()
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        found[row] = inner[begin:end] if valid[row] else None
    return found
