"""``Feed``: the rows of a rank as a user's function takes them, epoch after epoch.

The rows stay Arrow record batches until they are asked for: in memory, or beyond a budget in an
unnamed file of this machine's disk that is mapped, so that a later epoch costs no network.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.batches import generator
from sparkdl.data.storage import release_pages, spilling, unnamed_file
from sparkdl.errors import ConfigError, DataError
from sparkdl.settings.values import require_int

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
        return self.source.rows.slice(self.start, self.num_rows)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As arrays, whose first axis is the rows."""
        return {
            name: to_numpy(self.source.rows.column(number).slice(self.start, self.num_rows))
            if view is None
            else view[self.start : self.start + self.num_rows]
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
        sizes = array.value_lengths().to_numpy()
        if not len(sizes) or (sizes != sizes[0]).any():
            return None
        width = int(sizes[0])
    else:
        return None
    inner = _view(array.flatten())
    return None if inner is None else inner.reshape(len(array), width, *inner.shape[1:])


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


Uneven = Literal["drop", "pad", "join", "keep"]
Columns = dict[str, npt.NDArray[Any]]
_RECORD_BATCH_BYTES = 8 << 20


class _MappedBatches(Sequence[pa.RecordBatch]):
    """Record batches of a mapped file; pages of those that were given before leave this process.

    Args:
        ends: Where each batch ends in it; the first begins at 0, with what Arrow needs besides.
    """

    def __init__(self, mapped: mmap.mmap, ends: Sequence[int]) -> None:
        self._mapped, self._ends = mapped, ends
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped)))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._given: int | None = None
        release_pages(mapped, 0, len(mapped))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> pa.RecordBatch:  # type: ignore[override]  # no slices
        batch = self._batches[index]
        if self._given is not None and self._given != index:
            begin = self._ends[self._given - 1] if self._given else 0
            release_pages(self._mapped, begin, self._ends[self._given] - begin)
        self._given = index % len(self._batches)
        return batch


def size_of(rows: pa.RecordBatch | pa.Table) -> int:
    """The bytes of the rows of a batch or a table.

    Arrow's own ``nbytes`` crashes on lists of no rows without offsets, which Spark 4.0 sends of
    empty partitions and within lists of lists.
    """
    if isinstance(rows, pa.Table):
        return sum(map(size_of, rows.to_batches()))
    return sum(map(_size_of, rows.columns))


def _size_of(array: Any) -> int:
    if not len(array):
        return 0
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        wide = 8 if pa.types.is_large_list(kind) else 4
        return wide * (len(array) + 1) + _size_of(array.flatten())
    if pa.types.is_map(kind):  # keys and items are those of the array that this one is a slice of
        offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset :][: len(array) + 1]
        first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        inner = (array.keys.slice(first, count), array.items.slice(first, count))
        return offsets.nbytes + sum(map(_size_of, inner))
    if pa.types.is_struct(kind):
        return sum(map(_size_of, array.flatten()))
    return int(array.nbytes)


class RowSpool:
    """Record batches in the order they came: in memory, or in a mapped file beyond a budget.

    Args:
        budget_bytes: Bytes that may stay in memory.
        directory: Directory of the file; the system's temporary directory by default.
    """

    def __init__(self, budget_bytes: int, directory: str | None = None) -> None:
        self._budget, self._directory = budget_bytes, directory or tempfile.gettempdir()
        self._kept: list[pa.RecordBatch] = []
        self._kept_bytes = self.num_rows = 0
        self._ends: list[int] = []
        self._file: IO[bytes] | None = None
        self._sink: Any = None
        self._writer: Any = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Keeps some rows.

        Raises:
            ResourceError: The disk is full.
        """
        step = max(1, _RECORD_BATCH_BYTES * batch.num_rows // max(1, size_of(batch)))
        for start in range(0, batch.num_rows, step):
            self._add(batch.slice(start, step))
        self.num_rows += batch.num_rows

    def _add(self, batch: pa.RecordBatch) -> None:
        if self._writer is None:
            self._kept.append(batch)
            self._kept_bytes += size_of(batch)
            if self._kept_bytes <= self._budget:
                return
            waiting, self._kept = self._kept, []
        else:
            waiting = [batch]
        with spilling(self._directory, self._close, f" after {self.num_rows} rows"):
            if self._writer is None:
                self._file = unnamed_file(self._directory)
                self._sink = pa.PythonFile(self._file, "w")
                self._writer = pa.ipc.new_file(self._sink, batch.schema)
            for one in waiting:
                self._writer.write_batch(one)
                self._ends.append(self._sink.tell())

    def finish(self) -> Sequence[pa.RecordBatch]:
        """The batches; those on disk come into memory as they are taken, and leave it again."""
        if self._writer is None or self._file is None:
            return self._kept
        with spilling(self._directory, self._close):
            self._writer.close()
            self._file.flush()
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._close()
        return _MappedBatches(mapped, self._ends)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def equal_rows(counts: Sequence[int], uneven: Uneven) -> list[int]:
    """Rows that each rank gives in an epoch.

    Args:
        counts: Rows that each rank has.
        uneven: ``'drop'``: all give as many as the one that has fewest; ``'pad'``: as many as the
            one that has most, others begin again; ``'join'`` and ``'keep'``: each gives its own.

    Raises:
        DataError: A rank without rows cannot begin again, and cannot know the shape of none.

    >>> equal_rows([5, 3, 4], 'drop'), equal_rows([5, 3, 4], 'pad')
    ([3, 3, 3], [5, 5, 5])
    """
    most = max(counts)
    if uneven == "keep":
        return list(counts)
    if uneven == "drop":
        return [min(counts)] * len(counts)
    empty = [str(rank) for rank, count in enumerate(counts) if count == 0]
    if empty and most:
        use = "be repeated" if uneven == "pad" else "tell the shapes of empty batches"
        raise DataError(
            f"ranks {', '.join(empty)} have no rows that could {use}",
            expected=f"at least one row for each rank with uneven={uneven!r}",
            received=f"{sum(counts)} rows for {len(counts)} ranks",
            hint="fewer ranks, or uneven='drop'",
        )
    return list(counts) if uneven == "join" else [most] * len(counts)


class RowFeed(ABC):
    """Rows as a user's function takes them; for one thread."""

    @abstractmethod
    def should_stop(self) -> bool:
        """Whether there are no more rows."""

    @abstractmethod
    def terminate(self) -> None:
        """Gives no more rows; what is left is dropped."""

    @abstractmethod
    def next_arrow(self, batch_size: int) -> pa.Table | None:
        """The next rows as an Arrow table; None if there are no more. See :meth:`next_batch`."""

    def next_batch(self, batch_size: int) -> Columns:
        """The next rows: column name -> array whose first axis is the rows.

        Lists of one length become one array; lists of several lengths and texts arrays of objects.
        A batch does not reach into the next epoch: the last one of an epoch may be smaller. With
        ``uneven='join'`` arrays of no rows follow, until the rank with most rows has no more.

        Returns:
            An empty dict if there are no more rows.

        Raises:
            ConfigError: ``batch_size`` is no number of rows.
        """
        table = self.next_arrow(batch_size)
        return {} if table is None else _arrays(table)

    def batches(self, batch_size: int) -> Iterator[Columns]:
        """All batches to the last epoch's end, see :meth:`next_batch`."""
        while batch := self.next_batch(batch_size):
            yield batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One row after the other, as plain Python values."""
        while (table := self.next_arrow(1024)) is not None:
            yield from table.to_pylist()


class RowSource(Protocol):
    """Rows that are read as they are asked for; see :mod:`sparkdl.launch.feeding`."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    def record_batches(self) -> Generator[pa.RecordBatch]:
        """All of them, in their order; called again for each time that they are given."""


FedRows = Sequence[pa.RecordBatch] | RowSource


class Feed(RowFeed):
    """The rows of one rank, for ``epochs`` epochs; for one thread.

    Args:
        record_batches: The rows, or what reads them, which cannot be shuffled.
        epochs: Times that they are given; None for ever.
        rows: Rows of an epoch; more than there are begin again, fewer leave some out.
        joined: Rows of the rank that has most, if this feed shall give as many batches as the feed
            of that rank; None: it need not.
        shuffle: Whether each epoch permutes the record batches, and the rows within each.
    """

    def __init__(
        self,
        record_batches: FedRows,
        *,
        epochs: int | None = 1,
        rows: int | None = None,
        joined: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self._rows: FedRows = record_batches
        if isinstance(record_batches, Sequence):
            counts = [batch.num_rows for batch in record_batches]
            total = sum(counts)
            if not all(counts):
                self._rows = [batch for batch in record_batches if batch.num_rows]
        else:
            total = record_batches.num_rows
        self.rows_per_epoch = total if rows is None else rows
        if self.rows_per_epoch and not total:
            raise ConfigError("a feed without rows", expected="rows to repeat", received="none")
        self._epochs = epochs if self.rows_per_epoch else 0
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0
        """Epochs that were given to their end."""
        self._beyond = max(0, (joined or 0) - self.rows_per_epoch)
        self._left = self.rows_per_epoch + self._beyond
        self._source = self._rows_of_epoch()
        self._untaken = UntakenRows(NO_ROWS)
        self._terminated = False

    def should_stop(self) -> bool:
        return self._terminated or (self._epochs is not None and self.epoch >= self._epochs)

    def terminate(self) -> None:
        self._terminated = True
        with contextlib.suppress(ValueError):  # another thread of the framework's asks just now
            self._source.close()

    def next_arrow(self, batch_size: int) -> pa.Table | None:
        parts = self._take(batch_size)
        return None if not parts else pa.Table.from_batches([part.arrow() for part in parts])

    def next_batch(self, batch_size: int) -> Columns:
        parts = self._take(batch_size)
        if len(parts) == 1:
            return parts[0].arrays()
        return _arrays(pa.Table.from_batches([part.arrow() for part in parts])) if parts else {}

    def _take(self, batch_size: int) -> list[TakenRows]:
        require_int("batch_size", batch_size, 1)
        if self.should_stop():
            return []
        places = min(batch_size, self._left)
        wanted = min(places, max(0, self._left - self._beyond))
        parts, count = [], 0
        while count < wanted:
            if not self._untaken.left:
                self._untaken = UntakenRows(next(self._source))
            parts.append(self._untaken.take(wanted - count))
            count += parts[-1].num_rows
        if not parts:  # the rows are over, the batches of another rank are not
            parts.append(self._untaken.take(0))
        self._left -= places
        if not self._left:
            self.epoch += 1
            self._left = self.rows_per_epoch + self._beyond
            self._source.close()
            self._source, self._untaken = self._rows_of_epoch(), UntakenRows(NO_ROWS)
        return parts

    def _rows_of_epoch(self) -> Generator[pa.RecordBatch]:
        """The record batches in this epoch's order, again and again."""
        number = self.epoch
        while True:
            if not isinstance(self._rows, Sequence):
                yield from self._rows.record_batches()
                continue
            if not self._shuffle:
                yield from self._rows
                continue
            random = generator(self._seed, (number,))
            for place in random.permutation(len(self._rows)):
                rows = self._rows[place]
                yield rows.take(pa.array(random.permutation(rows.num_rows)))


def _arrays(table: pa.Table) -> Columns:
    return dict(zip(table.column_names, map(to_numpy, table.columns), strict=True))
