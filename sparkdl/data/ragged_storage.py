"""The storage of ragged columns while they are read, and on disk."""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np
import numpy.typing as npt

from sparkdl.data.ragged import Array, IndexArray, Ragged, Stored
from sparkdl.data.storage import GrowingArray, Storage, spilling


class GrowingRagged:
    """Ragged rows appended part by part; the counterpart of :class:`GrowingArray`.

    Args:
        shape: Of one position.
        dtype: NumPy dtype.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._values, self._lengths = GrowingArray(shape, dtype), GrowingArray((), np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows so far."""
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
        shape: Of one position.
        dtype: NumPy dtype.
        directory: Of the file; the system's temporary directory by default.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike, directory: str | None) -> None:
        self._shape, self._dtype = tuple(shape), np.dtype(dtype)
        self._directory = directory or tempfile.gettempdir()
        self._lengths = GrowingArray((), np.int64)
        with spilling(self._directory, self.close):
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115

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
        """Closes the file; the mapping, if there is one, stays."""
        file = getattr(self, "_file", None)
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class MappedRagged(Ragged):
    """Ragged rows in a mapped file.

    Args:
        values: See :class:`Ragged`, as for ``lengths``.
        lengths: See there.
        mapped: What ``values`` lie in; None without a position.
    """

    def __init__(self, values: Array, lengths: IndexArray, mapped: mmap.mmap | None) -> None:
        super().__init__(values, lengths)
        self._mapped = mapped

    def release(self) -> None:
        """Lets the pages that were read leave this process's memory; the system caches them."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if self._mapped is not None and advice is not None:
            with contextlib.suppress(OSError, ValueError):
                self._mapped.madvise(advice)


class SpilledRaggedStorage:
    """Storage with ragged columns: see :class:`sparkdl.data.storage.Storage`.

    Args:
        plain: All columns in blocks; of a ragged one the lengths of its rows.
        ragged: Number of a column -> its rows.
    """

    def __init__(self, plain: Storage, ragged: dict[int, MappedRagged]) -> None:
        self._plain, self._ragged = plain, ragged
        self.num_rows, self.block_rows = plain.num_rows, plain.block_rows
        self.group_blocks = plain.group_blocks

    def gather(self, column: int, indices: IndexArray) -> Stored:
        found = self._ragged.get(column)
        return self._plain.gather(column, indices) if found is None else found.take(indices)

    def slice(self, column: int, start: int, stop: int) -> Stored:
        found = self._ragged.get(column)
        if found is None:
            return self._plain.slice(column, start, stop)
        return found.slice(start, min(stop, len(found)))

    def focus(self, blocks: IndexArray) -> None:
        self._plain.focus(blocks)
        for column in self._ragged.values():
            column.release()
