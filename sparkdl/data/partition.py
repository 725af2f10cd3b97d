"""A partition's record batches, read once into columns: in memory, or spilled beyond a budget."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from sparkdl.data.columns import Array, DataSpec, IndexArray, Ragged, Stored
from sparkdl.data.conform import empty_stored
from sparkdl.data.decode import decode_stored, read_column
from sparkdl.data.rows import Rows
from sparkdl.data.storage import (
    GrowingArray,
    GrowingRagged,
    MemoryStorage,
    RaggedSpill,
    SpillWriter,
    Storage,
)
from sparkdl.errors import DataError
from sparkdl.process.closing import Closing

DEFAULT_BUDGET_BYTES = 1 << 30
_DECODED_BYTES = 64 << 20
"""The arrays that a user's decoder makes of the rows that are read at a time."""
_FREE_DIMENSION = 512
"""A guess at the size of a dimension that the model leaves free."""


class Partition(Closing):
    """The rows of one partition, split by their role.

    Args:
        train: Rows to train on.
        validation: Rows to validate on; none without a role column.
    """

    def __init__(self, train: Rows, validation: Rows) -> None:
        self.train, self.validation = train, validation

    @property
    def num_rows(self) -> int:
        """Rows of both roles."""
        return self.train.num_rows + self.validation.num_rows

    def under(self, spec: DataSpec) -> Partition:
        """The same rows under other names of inputs and outputs, with equal ``spec.entries``."""
        train, validation = self.train, self.validation
        return Partition(
            Rows(spec, train.storage, "training", train.order),
            Rows(spec, validation.storage, "validation", validation.order),
        )

    def find_order(self) -> None:
        """Gives the rows an order that their content decides; see :meth:`Rows.find_order`."""
        self.train.find_order()
        self.validation.find_order()

    @property
    def is_spilled(self) -> bool:
        """Whether some of the rows are on disk."""
        return not all(
            isinstance(rows.storage, MemoryStorage) for rows in (self.train, self.validation)
        )

    def check_finite(self) -> None:
        """Raises DataError if any row holds NaN or infinity; names the column and the row."""
        self.train.check_finite()
        self.validation.check_finite()

    def close(self) -> None:
        self.train.close()
        self.validation.close()


def read_partition(
    batches: Iterable[pa.RecordBatch],
    spec: DataSpec,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    spill_dir: str | None = None,
) -> Partition:
    """Reads record batches once into columns.

    Up to the budget the columns grow in memory (peak: the data and one record batch, of which a
    decoder's arrays are made some rows at a time). Beyond it
    they go to an unnamed, memory-mapped Arrow file, and later reads keep to the budget.

    Args:
        batches: Arrow record batches, e.g. the argument of ``mapInArrow``'s function.
        spec: The columns to keep.
        memory_budget_bytes: Bytes of decoded columns that may stay in memory.
        spill_dir: Directory for the file; the system's temporary directory by default.

    Raises:
        DataError: The data do not fit ``spec``, see ``decode``.
        ResourceError: The disk is full.
    """
    collectors = [_Collector(spec), _Collector(spec)]
    first_row = 0
    try:
        for batch in _slices(batches, spec):
            _add(collectors, batch, spec, first_row)
            first_row += batch.num_rows
            while (
                sum(c.memory_bytes for c in collectors) > memory_budget_bytes
                and (largest := max(collectors, key=lambda c: c.memory_bytes)).memory_bytes
            ):
                largest.spill(spill_dir, memory_budget_bytes)
        train, validation = (collector.finish() for collector in collectors)
    except BaseException:
        for collector in collectors:
            collector.close()
        raise
    return Partition(Rows(spec, train), Rows(spec, validation, "validation"))


def _slices(batches: Iterable[pa.RecordBatch], spec: DataSpec) -> Iterator[pa.RecordBatch]:
    """The rows of ``batches``, few enough at a time that a decoder's arrays stay small."""
    row_bytes = max(
        entry.value_dtype.itemsize * math.prod(d or _FREE_DIMENSION for d in entry.value_shape)
        for entry in spec.entries
    )
    expands = any(entry.kind == "decoded" for entry in spec.entries)
    step = max(1, _DECODED_BYTES // row_bytes) if expands else sys.maxsize
    for batch in batches:
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _add(
    collectors: Sequence[_Collector], batch: pa.RecordBatch, spec: DataSpec, first_row: int
) -> None:
    columns = decode_stored(batch, spec, first_row)
    if spec.role_column is None:
        collectors[0].append(columns, None, first_row)
        return
    roles = read_column(batch, spec.role_column, first_row)
    picked = [np.flatnonzero(roles == role) for role in (0, 1)]
    if sum(map(len, picked)) != len(roles):
        row = int(np.argmax((roles != 0) & (roles != 1)))
        raise DataError(
            f"row {first_row + row} of the partition: unknown role in the column that chooses "
            "the rows to validate on",
            expected="0 for training or 1 for validation",
            received="null in the boolean column" if roles[row] == -1 else str(roles[row]),
            hint="F.coalesce(column, F.lit(False)) trains on the rows in which it is null",
        )
    for collector, indices in zip(collectors, picked, strict=True):
        if len(indices):
            collector.append(columns, None if len(indices) == len(roles) else indices, first_row)


class _Collector:
    """Columns of one role while they are read: growing in memory, then on disk."""

    def __init__(self, spec: DataSpec) -> None:
        self._entries = spec.entries
        self._columns: list[GrowingArray | GrowingRagged] | None = None
        self._writer: SpillWriter | None = None
        self._ragged: dict[int, RaggedSpill] = {}
        self._num_rows = 0

    @property
    def memory_bytes(self) -> int:
        if self._columns is None or self._writer is not None:
            return 0
        return sum(column.nbytes for column in self._columns)

    def append(self, arrays: Sequence[Stored], indices: IndexArray | None, first_row: int) -> None:
        if self._columns is None:
            self._columns = [_growing(a) for a in arrays]
        for entry, column, stored in zip(self._entries, self._columns, arrays, strict=True):
            array: Array = stored.values if isinstance(stored, Ragged) else stored
            if array.shape[1:] != column.shape or array.dtype != column.dtype:
                raise DataError(
                    f"column {entry.label}: rows of unequal shape, from row {first_row} of the "
                    "partition on",
                    expected=f"shape {column.shape} of {column.dtype}, as the rows before",
                    received=f"shape {array.shape[1:]} of {array.dtype}",
                    hint="pad or resize to one shape",
                )
        if self._writer is not None:
            if indices is not None:
                arrays = [a.take(indices) if isinstance(a, Ragged) else a[indices] for a in arrays]
            self._write(arrays)
        else:
            for column, stored in zip(self._columns, arrays, strict=True):
                column.append(stored, indices)  # type: ignore[arg-type]  # each of its own kind
        self._num_rows += len(arrays[0]) if indices is None else len(indices)

    def spill(self, directory: str | None, budget_bytes: int) -> None:
        """Moves the columns from memory to a file; later rows go there directly."""
        columns = self._columns or []
        ragged = {i: c for i, c in enumerate(columns) if isinstance(c, GrowingRagged)}
        blocks: list[GrowingArray | None] = [
            None if isinstance(c, GrowingRagged) else c for c in columns
        ]
        in_blocks = sum(8 * self._num_rows if c is None else c.nbytes for c in blocks)
        share = in_blocks / max(1, in_blocks + sum(c.nbytes for c in ragged.values()))
        self._ragged = {i: RaggedSpill(c.shape, c.dtype, directory) for i, c in ragged.items()}
        self._writer = SpillWriter(
            [() if c is None else c.shape for c in blocks],
            [np.int64 if c is None else c.dtype for c in blocks],
            directory,
            max(1, int(budget_bytes * share)),
        )
        self._write([column.finish() for column in columns])

    def _write(self, columns: Sequence[Stored]) -> None:
        for number, rows in enumerate(columns):
            if isinstance(rows, Ragged):
                self._ragged[number].append(rows)
        if self._writer is not None:
            self._writer.append([c.lengths if isinstance(c, Ragged) else c for c in columns])

    def finish(self) -> Storage:
        if self._writer is not None:
            return self._writer.finish({n: spill.finish() for n, spill in self._ragged.items()})
        if self._columns is None:
            return MemoryStorage([empty_stored(entry) for entry in self._entries], 0)
        return MemoryStorage([column.finish() for column in self._columns], self._num_rows)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for spill in self._ragged.values():
            spill.close()


def _growing(stored: Stored) -> GrowingArray | GrowingRagged:
    if isinstance(stored, Ragged):
        return GrowingRagged(stored.values.shape[1:], stored.values.dtype)
    return GrowingArray(stored.shape[1:], stored.dtype)
