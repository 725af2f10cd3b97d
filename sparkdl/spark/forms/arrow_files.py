"""Parquet and Arrow files, read by pyarrow; of mapped Arrow files nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.feed import size_of
from sparkdl.data.plain_arrow import FileColumns, unwrapped
from sparkdl.data.shards import Pieces
from sparkdl.errors import DataError
from sparkdl.files.listing import FoundFile
from sparkdl.files.streams import FilePlace, is_local, open_input, place_of

_BLOCK_BYTES = _CHUNK_BYTES = 8 << 20
_WHOLE_BYTES = 128 << 20
"""Row groups of no more are asked of another machine whole, not column by column."""
_Reader: TypeAlias = "pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader"
_ARROW = (
    "an Arrow file or stream, as pyarrow.ipc.new_file and new_stream, "
    "pyarrow.feather.write_feather and datasets' save_to_disk write"
)


@dataclass(frozen=True)
class FileShard:
    """A file, or some row groups of a Parquet file, or record batches of an Arrow file.

    Args:
        size_bytes: Of what is to be read.
        number: The shard's number in the data set, before any dealing.
        role: 0 for rows to train on, 1 for rows to validate on.
    """

    file: FoundFile
    size_bytes: int
    row_groups: tuple[int, ...] | None = None
    number: int = 0
    role: int = 0


def arrow_facts(path: str) -> tuple[pa.Schema, tuple[int, ...]]:
    """The columns of an Arrow file, and the rows of each of its record batches.

    Raises:
        DataError: It is none.
    """
    with open_input(path, mapped=True) as stream:
        try:
            schema = _reader(stream).schema
            widths = [_width(field.type) for field in schema]
            reader = _opened(stream, path, [widths.index(min(widths))] if widths else [])
            return schema, tuple(batch.num_rows for _, batch in _numbered(reader))
        except (OSError, pa.ArrowException, KeyError) as error:
            raise _broken(path, error) from error


def arrow_pieces(
    path: str, numbers: Sequence[int] | None, columns: FileColumns
) -> Pieces[pa.RecordBatch]:
    """The record batches of a file as pieces, see :func:`read_numbered`; a stream is one piece.

    Small record batches are joined, as if all had the same size.
    """
    with open_input(path) as stream:
        try:
            reader = _reader(stream)
            if isinstance(reader, pa.ipc.RecordBatchStreamReader):
                return [partial(read_arrow, path, numbers, columns)]
            count = reader.num_record_batches
            step = max(1, _CHUNK_BYTES * count // max(1, stream.seek(0, 2)))
        except (OSError, pa.ArrowException) as error:
            raise _broken(path, error) from error
    chosen = range(count) if numbers is None else numbers
    return [
        partial(read_arrow, path, chosen[start : start + step], columns)
        for start in range(0, len(chosen), step)
    ]


def read_arrow(
    path: str, numbers: Sequence[int] | None, columns: FileColumns
) -> Iterator[pa.RecordBatch]:
    """Columns of an Arrow file's record batches, see :func:`read_numbered`."""
    yield from (batch for _, batch in read_numbered(path, numbers, columns))


def read_numbered(
    path: str, numbers: Sequence[int] | None, columns: FileColumns
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Columns of an Arrow file's record batches, with their numbers, in blocks of some megabytes.

    The blocks of a file of this machine that is not compressed are views of it.

    Args:
        numbers: Of the record batches, in ascending order; None for all.

    Raises:
        DataError: It cannot be read, lacks a column, or has one of another type.
    """
    with open_input(path, mapped=True) as stream:
        try:
            schema = _reader(stream).schema
            found = columns.found_in(path, schema)
            reader = _opened(stream, path, [schema.get_field_index(name) for name in found])
            for number, batch in _numbered(reader, numbers):
                arrays = [unwrapped(batch.column(name)) for name in found]
                batch = _batch(arrays, columns.names, batch)
                step = max(1, _CHUNK_BYTES * batch.num_rows // max(1, size_of(batch)))
                for start in range(0, batch.num_rows, step):
                    yield number, batch.slice(start, step)
        except (OSError, pa.ArrowException, IndexError) as error:
            raise _broken(path, error) from error


def _opened(stream: BinaryIO, path: str, fields: list[int]) -> _Reader:
    """The reader of some columns; of all of them where that costs nothing."""
    begin = islice(_numbered(_reader(stream)), 1) if is_local(path) else None
    if begin is not None and all(_is_view(first, stream) for _, first in begin):
        return _reader(stream)
    return _reader(stream, pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False))


def _numbered(
    reader: _Reader, numbers: Sequence[int] | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Record batches with their numbers; a stream is read from its begin, in its order."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches) if numbers is None else numbers:
            yield number, reader.get_batch(number)
        return
    wanted, last = set(numbers or ()), -1 if numbers is None else max(numbers, default=0)
    for number, batch in enumerate(reader):
        if numbers is None or number in wanted:
            yield number, batch
        if number == last:
            return
    if numbers:
        raise IndexError(f"no record batch {last}")


def _reader(stream: BinaryIO, options: pa.ipc.IpcReadOptions | None = None) -> _Reader:
    is_file = _begin(stream).read(6) == b"ARROW1"
    open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
    return open_reader(_begin(stream), options=options)


def _batch(arrays: list[pa.Array], names: Sequence[str], of: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(arrays, names=list(names)) if arrays else of.select([])


def _is_view(batch: pa.RecordBatch, stream: Any) -> bool:
    """Whether the rows lie in the mapped file, as they do if that is not compressed."""
    whole = _begin(stream).read_buffer()
    buffers = [b for column in batch.columns for b in column.buffers() if b is not None and b.size]
    return all(whole.address <= b.address < whole.address + whole.size for b in buffers)


def _begin(stream: Any) -> Any:
    stream.seek(0)
    return stream


def _width(kind: pa.DataType) -> int:
    return int(kind.bit_width) if pa.types.is_primitive(kind) else 1 << 20


@dataclass(frozen=True)
class ParquetPiece:
    """Row groups of a Parquet file that are read together.

    Args:
        groups: The numbers of the row groups.
        columns: What the columns that are read are called in it, and what here.
    """

    path: str
    place: FilePlace
    metadata: Any
    groups: tuple[int, ...]
    columns: Mapping[str, str]

    @property
    def num_rows(self) -> int:
        """The rows in these row groups."""
        return sum(self.metadata.row_group(number).num_rows for number in self.groups)

    def read(self) -> Iterator[pa.RecordBatch]:
        """Their rows, in blocks of some megabytes."""
        size = sum(self.metadata.row_group(number).total_byte_size for number in self.groups)
        blocks = max(1, round(size / _BLOCK_BYTES))
        step = max(1, min(65536, -(-self.num_rows // blocks)))
        with open_input(self.path, mapped=True, place=self.place) as stream:
            ahead = size <= _WHOLE_BYTES and not self.place.is_local
            file = _parquet(stream, self.path, metadata=self.metadata, pre_buffer=ahead)
            try:
                for batch in file.iter_batches(
                    step, row_groups=list(self.groups), columns=list(self.columns),
                    use_threads=False,
                ):  # fmt: skip
                    arrays = [batch.column(name) for name in self.columns]
                    yield _batch(arrays, [*self.columns.values()], batch)
            except (OSError, pa.ArrowException) as error:
                raise _broken(self.path, error, "a sound Parquet file") from error


def parquet_pieces(shard: FileShard, columns: FileColumns) -> list[ParquetPiece]:
    """The row groups of a Parquet file, small ones joined, in their order.

    Raises:
        DataError: It cannot be read, lacks a column, has one of another type, or fewer row groups
            than the driver saw.
    """
    path = shard.file.path
    place = place_of(path)
    with open_input(path, place=place) as stream:
        file = _parquet(stream, path)
        metadata, found = file.metadata, columns.found_in(path, file.schema_arrow)
    names = dict(zip(found, columns.names, strict=True))
    there = metadata.num_row_groups
    numbers = range(there) if shard.row_groups is None else shard.row_groups
    if numbers and max(numbers) >= there:
        raise lost_rows(path, f"a row group with the number {max(numbers)}", f"{there} row groups")
    joined: list[list[int]] = []
    room = 0
    for number in numbers:
        size = metadata.row_group(number).total_byte_size
        if size > room:
            joined.append([])
            room = _BLOCK_BYTES
        joined[-1].append(number)
        room -= size
    return [ParquetPiece(path, place, metadata, tuple(groups), names) for groups in joined]


def parquet_footer(path: str) -> tuple[Any, pa.Schema]:
    """The metadata of a Parquet file, and its columns."""
    with open_input(path) as stream:
        file = _parquet(stream, path)
        return file.metadata, file.schema_arrow


def parquet_facts(path: str) -> tuple[pa.Schema, tuple[int, ...]]:
    """The columns of a Parquet file, and the rows of each of its row groups."""
    metadata, schema = parquet_footer(path)
    return schema, tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))


def _parquet(
    stream: BinaryIO, path: str, metadata: Any = None, pre_buffer: bool = False
) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(stream, metadata=metadata, buffer_size=1 << 20, pre_buffer=pre_buffer)
    except (OSError, pa.ArrowException) as error:
        raise _broken(path, error, "a sound Parquet file") from error


def lost_rows(path: str, expected: str, received: str) -> DataError:
    """The error of a file that was changed while it was read."""
    return DataError(
        f"{path} has lost rows since the driver looked at it", expected=expected, received=received,
        hint="write new data into a new folder",
    )  # fmt: skip


def _broken(path: str, error: Exception, expected: str = _ARROW) -> DataError:
    return DataError(f"{path} cannot be read", expected=expected, received=str(error)[:500])
