"""The storage of a partition's columns: memory, or a memory-mapped Arrow file without a name."""

from __future__ import annotations

import contextlib
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.columns import Array, IndexArray, Ragged, Stored
from sparkdl.errors import ResourceError

_BLOCK_BYTES = 1 << 20
_FIRST_BYTES = 1 << 20
_NEIGHBOURS_BYTES = 64 << 10
"""Linux maps so much around a page that is read (``fault_around_bytes``)."""


class Storage(Protocol):
    """Columns of equal length; column ``i`` belongs to ``DataSpec.entries[i]``.

    Reading is thread-safe.
    """

    num_rows: int
    block_rows: int | None
    """Rows that lie together on disk, or None in memory."""
    group_blocks: int
    """Blocks that are read together; three such groups may be in memory at one time."""

    def gather(self, column: int, indices: IndexArray) -> Stored:
        """A new array (or new ragged rows) of the rows at ``indices``."""

    def slice(self, column: int, start: int, stop: int) -> Stored:
        """The rows from ``start`` to ``stop``, without a copy where they lie together."""

    def focus(self, blocks: IndexArray) -> None:
        """Tells which blocks are read next: they are read ahead, and earlier ones leave memory."""


class MemoryStorage:
    """Columns as contiguous arrays, or ragged rows, in memory."""

    block_rows: int | None = None
    group_blocks = 1

    def __init__(self, columns: Sequence[Stored], num_rows: int) -> None:
        self.columns = [c if isinstance(c, Ragged) else np.ascontiguousarray(c) for c in columns]
        self.num_rows = num_rows

    def gather(self, column: int, indices: IndexArray) -> Stored:
        found = self.columns[column]
        if isinstance(found, Ragged):
            return found.take(indices)
        return np.take(found, indices, axis=0)

    def slice(self, column: int, start: int, stop: int) -> Stored:
        found = self.columns[column]
        if isinstance(found, Ragged):
            return found.slice(start, min(stop, self.num_rows))
        return found[start:stop]

    def focus(self, blocks: IndexArray) -> None:
        """Nothing to do: all rows are in memory."""


class GrowingArray:
    """Rows appended part by part, into memory that grows without a second copy.

    Private anonymous memory grows by moving its pages (``mremap``), so the peak is the final size
    and not twice that, as with a list of parts and ``np.concatenate``.

    Args:
        shape: Shape of one row.
        dtype: NumPy dtype.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.row_bytes = self.dtype.itemsize * math.prod(self.shape)
        self.num_rows = 0
        self._memory: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes

    def append(self, rows: Array, indices: IndexArray | None = None) -> None:
        """Copies ``rows`` (or ``rows[indices]``) behind the rows that are already there."""
        count = len(rows) if indices is None else len(indices)
        start, self.num_rows = self.num_rows, self.num_rows + count
        if not count or not self.row_bytes:
            return
        self._reserve(self.num_rows * self.row_bytes)
        room = self._view(start, self.num_rows)
        if indices is None:
            room[...] = rows
        else:
            np.take(rows, indices, axis=0, out=room, mode="clip")

    def finish(self) -> Array:
        """The rows as one array, which owns the memory; this object is empty afterwards."""
        if self._memory is None:
            return np.empty((self.num_rows, *self.shape), self.dtype)
        self._resize(self.num_rows * self.row_bytes)
        rows = self._view(0, self.num_rows)
        self._memory = None
        return rows

    def _view(self, start: int, stop: int) -> Array:
        flat = np.frombuffer(
            self._memory or b"",
            self.dtype,
            (stop - start) * math.prod(self.shape),
            start * self.row_bytes,
        )
        return flat.reshape(stop - start, *self.shape)

    def _reserve(self, size: int) -> None:
        if self._memory is None:
            self._memory = _anonymous(max(size, _FIRST_BYTES))
        elif size > len(self._memory):
            self._resize(max(size, len(self._memory) * 3 // 2))

    def _resize(self, size: int) -> None:
        old = self._memory
        if old is None or size == len(old):
            return
        try:
            old.resize(size)
        except (SystemError, ValueError):  # no mremap on this platform
            self._memory = _anonymous(size)
            count = min(size, len(old))
            self._memory[:count] = old[:count]


def _anonymous(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # Linux has it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class SpilledStorage:
    """Columns in blocks of ``block_rows`` rows inside a memory-mapped Arrow IPC file.

    Every record batch of the file has the same number of rows and fixed-width columns, hence the
    same size, so a column is one strided array over the whole file: ``[block, row, ...]``. Of a
    ragged column the blocks have the lengths of its rows, which lie in a file of their own.
    """

    def __init__(
        self,
        mapped: mmap.mmap,
        columns: Sequence[Array],
        num_rows: int,
        block_rows: int,
        group_blocks: int,
        spans: Sequence[tuple[int, int]],
        ragged: Mapping[int, MappedRagged],
    ) -> None:
        self.num_rows = num_rows
        self.block_rows: int | None = block_rows
        self.group_blocks = group_blocks
        self._mapped, self._columns, self._spans = mapped, list(columns), list(spans)
        self._rows, self._ragged = block_rows, ragged
        self._focused: frozenset[int] = frozenset()
        self._sliced_group = -1

    def gather(self, column: int, indices: IndexArray) -> Stored:
        if column in self._ragged:
            return self._ragged[column].take(indices)
        block, row = np.divmod(indices, self._rows)
        found: Array = self._columns[column][block, row]
        return found

    def slice(self, column: int, start: int, stop: int) -> Stored:
        if column in self._ragged:
            return self._ragged[column].slice(start, min(stop, self.num_rows))
        blocks = self._columns[column]
        first, last = start // self._rows, max(stop - 1, start) // self._rows
        if first // self.group_blocks != self._sliced_group:
            self._sliced_group = group = first // self.group_blocks
            self.focus(np.arange(group * self.group_blocks, (group + 1) * self.group_blocks))
        if first == last and first < len(blocks):
            return blocks[first, start - first * self._rows : stop - first * self._rows]
        out = np.empty((stop - start, *blocks.shape[2:]), blocks.dtype)
        for b in range(first, last + 1 if stop > start else first):
            lo, hi = max(start, b * self._rows), min(stop, (b + 1) * self._rows)
            out[lo - start : hi - start] = blocks[b, lo - b * self._rows : hi - b * self._rows]
        return out

    def focus(self, blocks: IndexArray) -> None:
        wanted = frozenset(int(b) for b in blocks if b < len(self._spans))
        left, self._focused = self._focused - wanted, wanted
        for block in sorted(left):
            release_pages(self._mapped, *self._spans[block])
        for block in sorted(wanted):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # Linux has it
                self._mapped.madvise(mmap.MADV_WILLNEED, *self._spans[block])
        for rows in self._ragged.values():
            rows.release()


def release_pages(mapped: mmap.mmap, begin: int, length: int) -> None:
    """Gives up the pages of a part of a mapped file that was read; who reads on gets them again.

    They stay in the system's cache, but no longer count as memory of this process, which YARN and
    Kubernetes limit. With a page that is read the system maps its neighbours, too, so those of
    the parts beside it go as well.

    Args:
        mapped: Read-only.
        begin: Where the part begins, in bytes.
        length: In bytes.
    """
    first = max(0, begin - _NEIGHBOURS_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    end = min(len(mapped), begin + length + _NEIGHBOURS_BYTES)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Linux has it
        mapped.madvise(mmap.MADV_DONTNEED, first, end - first)


@contextlib.contextmanager
def spilling(directory: str, close: Callable[[], None], done: str = "") -> Iterator[None]:
    """Within, an error of the disk closes what is written to, and is a ResourceError.

    Args:
        directory: Written to.
        close: Called then.
        done: How far it went, for the message.
    """
    try:
        yield
    except OSError as error:
        close()
        raise ResourceError(
            f"cannot spill a partition to disk in {directory!r}",
            expected="a directory with room for the partition", received=f"{error}{done}",
            hint="raise the memory budget, use more partitions, or spill to a larger disk",
        ) from error  # fmt: skip


def unnamed_file(directory: str) -> IO[bytes]:
    """A file that never has a name, so that it is freed however the process ends.

    Raises:
        ResourceError: The disk is full or cannot be written.
    """
    with spilling(directory, lambda: None):
        return tempfile.TemporaryFile(dir=directory)


class SpillWriter:
    """Writes rows to an Arrow IPC file without a name, then maps it.

    Args:
        shapes: Shape of one row, per column.
        dtypes: NumPy dtype, per column.
        directory: Directory of the file; the system's temporary directory by default.
        budget_bytes: Bytes that may be in memory while the rows are read back.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[npt.DTypeLike],
        directory: str | None,
        budget_bytes: int,
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._dtypes = [np.dtype(dtype) for dtype in dtypes]
        self._widths = [
            d.itemsize * math.prod(s) for s, d in zip(self._shapes, self._dtypes, strict=True)
        ]
        row_bytes = max(sum(self._widths), 1)
        self.block_rows = max(1, min(_BLOCK_BYTES, budget_bytes // 16) // row_bytes)
        self.group_blocks = max(1, budget_bytes // 3 // (self.block_rows * row_bytes))
        self.num_rows = 0
        self._staged = [
            np.zeros((self.block_rows, *s), d)
            for s, d in zip(self._shapes, self._dtypes, strict=True)
        ]
        self._fill = 0
        self._ends: list[int] = []
        self._directory = directory or tempfile.gettempdir()
        self._schema = pa.schema([(str(i), pa.binary(w)) for i, w in enumerate(self._widths)])
        self._file = unnamed_file(self._directory)
        self._sink = pa.PythonFile(self._file, mode="w")
        with self._disk():
            self._writer = pa.ipc.new_file(self._sink, self._schema)

    def _disk(self) -> contextlib.AbstractContextManager[None]:
        done = f" after {self.num_rows} rows of {sum(self._widths)} bytes"
        return spilling(self._directory, self.close, done)

    def append(self, columns: Sequence[Array]) -> None:
        """Adds rows, one array per column.

        Raises:
            ResourceError: The disk is full or cannot be written.
        """
        count, done = len(columns[0]), 0
        while done < count:
            if self._fill == 0 and count - done >= self.block_rows:
                self._write([c[done : done + self.block_rows] for c in columns])
                done += self.block_rows
                continue
            take = min(self.block_rows - self._fill, count - done)
            for staged, column in zip(self._staged, columns, strict=True):
                staged[self._fill : self._fill + take] = column[done : done + take]
            self._fill += take
            done += take
            if self._fill == self.block_rows:
                self._write(self._staged)
                self._fill = 0
        self.num_rows += count

    def _write(self, block: Sequence[Array]) -> None:
        arrays = [
            pa.FixedSizeBinaryArray.from_buffers(
                field.type,
                self.block_rows,
                [None, pa.py_buffer(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))],
            )
            for field, rows in zip(self._schema, block, strict=True)
        ]
        with self._disk():
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
            self._ends.append(self._sink.tell())

    def finish(self, ragged: Mapping[int, MappedRagged]) -> SpilledStorage:
        """Maps the file; from here on the rows are read-only.

        Args:
            ragged: Number of a column of which the lengths of rows were written -> the rows.

        Raises:
            ResourceError: The disk is full or the file cannot be mapped.
        """
        if self._fill:
            self._write(self._staged)  # the last block is padded: all blocks have one size
        with self._disk():
            self._writer.close()
            self._file.flush()
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self.close()
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped)))
        base = pa.py_buffer(mapped).address
        # Looking at each block here would bring pages of the whole file into memory.
        number, strides = len(self._ends), np.diff(self._ends)
        stride = int(strides[0]) if strides.size else 0
        found = [[c.buffers()[1].address - base for c in reader.get_batch(i).columns]
                 for i in (0, number - 1)[:number]]  # fmt: skip
        starts = np.array(found, np.int64).reshape(len(found), len(self._widths))
        if (strides != stride).any() or (np.diff(starts, axis=0) != stride * (number - 1)).any():
            raise ResourceError(
                "the spilled file has blocks of unequal size",
                expected=f"one block every {stride} bytes",
                received=f"distances {np.unique(strides).tolist()}",
                hint="this is a defect of sparkdl or of this pyarrow version: please report it",
            )
        columns = [
            np.ndarray(
                (number,), np.dtype((dtype, (self.block_rows, *shape))), mapped, int(starts[0, i]),
                (stride or self.block_rows * width,),
            )
            for i, (shape, dtype, width) in enumerate(
                zip(self._shapes, self._dtypes, self._widths, strict=True)
            )
        ]  # fmt: skip
        return SpilledStorage(
            mapped, columns, self.num_rows, self.block_rows, self.group_blocks,
            [self._span(starts[0] + i * stride, len(mapped)) for i in range(number)], ragged,
        )  # fmt: skip

    def _span(self, starts: Array, size: int) -> tuple[int, int]:
        first = int(starts[0]) // mmap.PAGESIZE * mmap.PAGESIZE
        last = int(starts[-1]) + self._widths[-1] * self.block_rows
        return first, min(last, size) - first

    def close(self) -> None:
        """Closes the file; the mapping, if there is one, stays."""
        for stream in (self._sink, self._file):
            with contextlib.suppress(OSError):
                stream.close()


class GrowingRagged:
    """Ragged rows appended part by part; the counterpart of :class:`GrowingArray`.

    Args:
        shape: Shape of one position.
        dtype: NumPy dtype.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._values, self._lengths = GrowingArray(shape, dtype), GrowingArray((), np.int64)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._lengths.nbytes

    def append(self, rows: Ragged, indices: IndexArray | None = None) -> None:
        """Copies ``rows``, or those at ``indices``, behind the rows that are already there."""
        if indices is not None:
            rows = rows.take(indices)
        self._values.append(rows.values)
        self._lengths.append(rows.lengths)

    def finish(self) -> Ragged:
        """The rows; this object is empty afterwards."""
        return Ragged(self._values.finish(), self._lengths.finish())


class RaggedSpill:
    """Writes the positions of ragged rows to a file without a name; their lengths stay in memory.

    Args:
        shape: Shape of one position.
        dtype: NumPy dtype.
        directory: Directory of the file; the system's temporary directory by default.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike, directory: str | None) -> None:
        self._shape, self._dtype = tuple(shape), np.dtype(dtype)
        self._directory = directory or tempfile.gettempdir()
        self._lengths = GrowingArray((), np.int64)
        self._file = unnamed_file(self._directory)

    def append(self, rows: Ragged) -> None:
        """Adds rows.

        Raises:
            ResourceError: The disk is full or cannot be written.
        """
        with spilling(self._directory, self.close):
            self._file.write(np.ascontiguousarray(rows.values).data)
        self._lengths.append(rows.lengths)

    def finish(self) -> MappedRagged:
        """Maps the file.

        Raises:
            ResourceError: The disk is full or the file cannot be mapped.
        """
        with spilling(self._directory, self.close):
            self._file.flush()
            size = self._file.tell()
            mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) if size else None
        self.close()
        values = np.frombuffer(b"" if mapped is None else mapped, self._dtype)
        lengths = self._lengths.finish()
        return MappedRagged(values.reshape(int(lengths.sum()), *self._shape), lengths, mapped)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class MappedRagged(Ragged):
    """Ragged rows in a mapped file.

    Args:
        values, lengths: As for :class:`Ragged`.
        mapped: What ``values`` lie in; None without a position.
    """

    def __init__(self, values: Array, lengths: IndexArray, mapped: mmap.mmap | None) -> None:
        super().__init__(values, lengths)
        self._mapped = mapped

    def release(self) -> None:
        """Lets the pages that were read leave this process's memory; the system caches them."""
        if self._mapped is not None:
            release_pages(self._mapped, 0, len(self._mapped))
