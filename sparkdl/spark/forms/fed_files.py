"""Files that the ranks of ``run(fn, data=...)`` read by themselves, in equal shares."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from sparkdl.data.plain_arrow import FileColumns, unwrapped
from sparkdl.data.shards import Pieces, read_files
from sparkdl.files.file_system import NoFileSystemError
from sparkdl.files.listing import FoundFile
from sparkdl.files.streams import is_local
from sparkdl.process.user_warnings import warn_user
from sparkdl.spark.files import files_for_workers
from sparkdl.spark.forms.arrow_files import (
    FileShard,
    arrow_facts,
    lost_rows,
    parquet_facts,
    parquet_pieces,
    read_arrow,
)
from sparkdl.spark.forms.files import FileKind, kind_of_path, table_of
from sparkdl.spark.session.versions import arrow_schema_of

_MOST_FILES = 500
"""The most files whose ends the driver reads to know their rows; Spark reads those of more."""


@dataclass(frozen=True)
class FileRows:
    """Rows of files, of which each rank reads a range; see ``launch.feeding.RowFiles``.

    Args:
        files: Each with the rows of its row groups or record batches.
        schema: The columns, with Spark's types.
    """

    files: tuple[tuple[FoundFile, tuple[int, ...]], ...]
    schema: pa.Schema
    ranks: int
    kind: FileKind = "parquet"

    @property
    def read_again(self) -> bool:
        """Whether each epoch reads the files: Arrow files need no decoding."""
        return self.kind == "arrow"

    def num_rows(self, rank: int) -> int:
        """The rows of a rank."""
        begin, end = self._bounds(rank)
        return end - begin

    def _bounds(self, rank: int) -> tuple[int, int]:
        total = sum(sum(groups) for _, groups in self.files)
        return total * rank // self.ranks, total * (rank + 1) // self.ranks

    def batches(self, rank: int, readers: int | None = None) -> Generator[pa.RecordBatch]:
        """The rank's rows; those of two ranks differ by one at most.

        Args:
            readers: See :func:`sparkdl.data.shards.read_files`; of mapped files there are none.

        Raises:
            DataError: A file cannot be read, or has changed since the driver looked at it.
        """
        files = [partial(self._open, *part) for part in self._parts(rank)]
        if self.kind != "arrow":
            yield from read_files(files, readers)
            return
        for open_file in files:
            for read in open_file():
                yield from read()

    def _parts(self, rank: int) -> Iterator[tuple[FileShard, int, int]]:
        """Row groups that hold rows of the rank, the rows before these, and their number."""
        begin, end = self._bounds(rank)
        at = 0
        for file, groups in self.files:
            chosen: list[int] = []
            skipped = 0
            for number, rows in enumerate(groups):
                if at < end and at + rows > begin:
                    skipped = skipped if chosen else max(0, begin - at)
                    chosen.append(number)
                at += rows
            if chosen:
                there = sum(groups[number] for number in chosen)
                left = min(there - skipped, end - begin)
                yield FileShard(file, 0, tuple(chosen)), skipped, left
                begin += left

    def _open(self, shard: FileShard, skipped: int, count: int) -> Pieces[pa.RecordBatch]:
        path, names = shard.file.path, FileColumns(self.schema.names)
        if self.kind == "arrow":
            read = partial(read_arrow, path, shard.row_groups, names)
            return [partial(self._range, read, path, skipped, count)]
        found: list[Callable[[], Iterator[pa.RecordBatch]]] = []
        for piece in parquet_pieces(shard, names):
            own = min(count, max(0, piece.num_rows - skipped))
            if own:
                found.append(partial(self._range, piece.read, path, skipped, own))
            skipped, count = max(0, skipped - piece.num_rows), count - own
        if count:
            found.append(partial(self._range, lambda: iter(()), path, 0, count))
        return found

    def _range(
        self, read: Callable[[], Iterator[pa.RecordBatch]], path: str, skipped: int, count: int
    ) -> Iterator[pa.RecordBatch]:
        for batch in read():
            part = batch.slice(skipped, count)
            skipped = max(0, skipped - batch.num_rows)
            if part.num_rows:
                count -= part.num_rows
                columns = [_as_type(part.column(field.name), field.type) for field in self.schema]
                yield pa.RecordBatch.from_arrays(columns, names=self.schema.names)
            if not count:
                return
        raise lost_rows(path, f"{count} more of its rows", "the file's end")


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    found = column.type
    if pa.types.is_fixed_size_list(found) and found.value_type == kind.value_type:
        return column
    return unwrapped(column).cast(kind)


def fed_files(path: str, frame: Any, columns: tuple[str, ...], ranks: int) -> FileRows | None:
    """The files if the ranks can read them by themselves; None if Spark must.

    Spark reads what is neither Parquet nor Arrow, Arrow files that are not on this machine, very
    many files, files with different columns, folders by column, and types that Spark and Arrow may
    read differently: times, decimals, maps, structs.

    Args:
        frame: Them as a DataFrame, vectors as arrays.
        columns: Names of its columns in the files.
    """
    kind = kind_of_path(path)
    if kind == "tfrecord" or table_of(path) or not all(_is_plain(f.dataType) for f in frame.schema):
        return None
    try:
        files = files_for_workers(path)
    except NoFileSystemError as error:
        warn_user(f"the ranks cannot read the files by themselves, so Spark does: {error.what}")
        return None
    if not files or len(files) > _MOST_FILES or any(file.partition_values for file in files):
        return None
    if kind == "arrow" and not all(is_local(file.path) for file in files):
        return None  # to count the rows could take as long as to read them
    facts_of = arrow_facts if kind == "arrow" else parquet_facts
    facts = [facts_of(file.path) for file in files]
    there = facts[0][0]
    if any(schema != there for schema, _ in facts) or not set(columns) <= set(there.names):
        return None
    if any(pa.types.is_struct(there.field(name).type) for name in columns):  # vectors
        return None
    types = [field.type for field in arrow_schema_of(frame.schema)]
    counted = tuple((file, groups) for file, (_, groups) in zip(files, facts, strict=True))
    return FileRows(counted, pa.schema(list(zip(columns, types, strict=True))), ranks, kind)


def _is_plain(kind: Any) -> bool:
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        return _is_plain(kind.elementType)
    plain = (T.IntegralType, T.FloatType, T.DoubleType, T.StringType, T.BinaryType, T.BooleanType)
    return isinstance(kind, plain)
