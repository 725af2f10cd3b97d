"""Rows by number, in memory or spilled to disk; batches are gathered from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparkdl.data.columns import Batch, ColumnSpec, DataSpec
from sparkdl.data.ragged import IndexArray, Ragged
from sparkdl.data.row_order import content_order
from sparkdl.data.storage import MemoryStorage, Storage
from sparkdl.errors import DataError

_SCAN_BYTES = 1 << 22
AnyArray = npt.NDArray[np.generic]


class Rows:
    """A fixed number of rows with random access.

    Reading is thread-safe. Arrays from ``slice`` may alias the storage: treat them as read-only.
    Arrays from ``take`` are new.

    Args:
        spec: The columns.
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
                f"the {self.name} rows are closed",
                expected="rows that are still open",
                received="a read after close()",
                hint="finish the epoch before the partition is closed",
            )
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
