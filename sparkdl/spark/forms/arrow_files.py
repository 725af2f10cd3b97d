"""Arrow files (``.arrow``, ``.feather``): read without a copy where they are mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from sparkdl.data.feed import size_of
from sparkdl.data.plain_arrow import plain, unwrapped
from sparkdl.data.shards import Pieces, folder_column
from sparkdl.errors import DataError
from sparkdl.files.listing import FoundFile
from sparkdl.files.streams import is_local, open_input
from sparkdl.spark.session.versions import arrow_schema_of, spark_schema_of

if TYPE_CHECKING:
    from pyspark.sql import types as T

_CHUNK_BYTES = 8 << 20


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
            numbers = range(reader.num_record_batches)
            return schema, tuple(reader.get_batch(n).num_rows for n in numbers)
        except (OSError, pa.ArrowException) as error:
            raise _broken(path, error) from error


def arrow_pieces(
    path: str, numbers: Sequence[int] | None, columns: Sequence[str]
) -> Pieces[pa.RecordBatch]:
    """The record batches of a file as pieces to be read; a file of this machine is one piece.

    Small record batches are joined, as if all had the same size.

    Args:
        path: Of the file.
        numbers: Of the record batches; None for all.
        columns: Names of the columns.

    Raises:
        DataError: It cannot be read.
    """
    if is_local(path):
        return [partial(read_arrow, path, numbers, columns)]
    with open_input(path) as stream:
        try:
            count = _reader(stream).num_record_batches
            step = max(1, _CHUNK_BYTES * count // max(1, stream.seek(0, 2)))
        except (OSError, pa.ArrowException) as error:
            raise _broken(path, error) from error
    chosen = range(count) if numbers is None else numbers
    return [
        partial(read_arrow, path, chosen[start : start + step], columns)
        for start in range(0, len(chosen), step)
    ]


def read_arrow(
    path: str, numbers: Sequence[int] | None, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Columns of an Arrow file's record batches, in blocks of some megabytes.

    The blocks of a file of this machine that is not compressed are views of it.

    Args:
        path: Of the file.
        numbers: Of the record batches; None for all.
        columns: Names of the columns.

    Raises:
        DataError: It cannot be read, or lacks a column.
    """
    with open_input(path, mapped=True) as stream:
        try:
            schema = _reader(stream).schema
            for name in columns:
                if name not in schema.names:
                    raise DataError(
                        f"{path} has other columns than the files before",
                        expected=f"the column {name!r}",
                        received=f"the columns {schema.names}",
                    )
            reader = _opened(stream, path, [schema.get_field_index(name) for name in columns])
            for number in range(reader.num_record_batches) if numbers is None else numbers:
                batch = reader.get_batch(number)
                arrays = [unwrapped(batch.column(name)) for name in columns]
                batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
                step = max(1, _CHUNK_BYTES * batch.num_rows // max(1, size_of(batch)))
                for start in range(0, batch.num_rows, step):
                    yield batch.slice(start, step)
        except (OSError, pa.ArrowException, IndexError) as error:
            raise _broken(path, error) from error


def _opened(stream: BinaryIO, path: str, fields: list[int]) -> Any:
    """The reader of some columns; of all of them where that costs nothing.

    pyarrow copies columns that it is told to choose, also from a mapped file.
    """
    reader = _reader(stream)
    if is_local(path) and (not reader.num_record_batches or _is_view(reader.get_batch(0), stream)):
        return reader
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    return _reader(stream, options)


@dataclass(frozen=True)
class _Streamed:
    """The record batches of a stream, which can be read in their order alone."""

    schema: pa.Schema
    batches: list[pa.RecordBatch]

    @property
    def num_record_batches(self) -> int:
        return len(self.batches)

    def get_batch(self, number: int) -> pa.RecordBatch:
        return self.batches[number]


def _reader(
    stream: BinaryIO, options: pa.ipc.IpcReadOptions | None = None
) -> pa.ipc.RecordBatchFileReader | _Streamed:
    """The record batches of a file or a stream of Arrow's; a mapped one is not copied."""
    is_file = _begin(stream).read(6) == b"ARROW1"
    if is_file:
        return pa.ipc.open_file(_begin(stream), options=options)
    reader = pa.ipc.open_stream(_begin(stream), options=options)
    return _Streamed(reader.schema, list(reader))


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


def _broken(path: str, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read",
        expected="an Arrow file or stream, as pyarrow.ipc.new_file and new_stream, "
        "pyarrow.feather.write_feather and datasets' save_to_disk write",
        received=str(error)[:500],
    )


def frame_of_arrow(spark: Any, path: str) -> Any:
    """Arrow files as a DataFrame; a task reads some files.

    Raises:
        DataError: A file has other columns than the first one, or types that Spark lacks.
        ResourceError: There are no files.
    """
    from pyspark.sql import types as T

    from sparkdl.spark.files.worker_paths import files_for_workers
    from sparkdl.spark.session.running import context_of, this_interpreter
    from sparkdl.spark.tfrecord.reading import folder_fields

    files = files_for_workers(path)
    schema = arrow_facts(files[0].path)[0]
    fields = [f for field in schema.remove_metadata() for f in known_to_spark(field)]
    fields += [field for field in folder_fields(files) if field.name not in schema.names]
    kinds = T.StructType(fields)
    task = _ArrowTask(tuple(files), arrow_schema_of(kinds))
    with this_interpreter(context_of(spark)):
        return spark.range(0, len(files), 1, len(files)).mapInArrow(task, kinds)


def known_to_spark(field: pa.Field) -> list[T.StructField]:
    """A column of files as Spark's; none if Spark has no such type."""
    try:
        return list(spark_schema_of(pa.schema([field])).fields)
    except (TypeError, NotImplementedError):  # what pyspark raises for an unknown type
        return []


@dataclass(frozen=True)
class _ArrowTask:
    """Reads the files whose numbers a task gets."""

    files: tuple[FoundFile, ...]
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._rows(self.files[number])

    def _rows(self, file: FoundFile) -> Iterator[pa.RecordBatch]:
        folders = file.partition_values
        names = [name for name in self.schema.names if name not in folders]
        for part in read_arrow(file.path, None, names):
            columns = [
                folder_column(folders[field.name], field, part.num_rows)
                if field.name in folders
                else plain(part.column(field.name)).cast(field.type)
                for field in self.schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
