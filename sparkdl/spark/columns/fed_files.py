"""Parquet files that the ranks of ``run(fn, data=...)`` read by themselves, in equal shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.errors import DataError
from sparkdl.files.streams import FoundFile, find_files
from sparkdl.spark.columns.files import FileShard, kind_of_path, parquet_facts, read_groups

_MOST_FILES = 500
"""Of more files the driver does not read the ends to know their rows: Spark reads them."""


@dataclass(frozen=True)
class ParquetRows:
    """Rows of files, of which each rank reads a range; see ``launch.feeding.RowFiles``.

    Args:
        files: Each with the rows of its row groups.
        schema: The columns, with Spark's types.
        ranks: How many share the rows.
    """

    files: tuple[tuple[FoundFile, tuple[int, ...]], ...]
    schema: pa.Schema
    ranks: int

    def batches(self, rank: int) -> Iterator[pa.RecordBatch]:
        """The rank's rows; those of two ranks differ by one at most.

        Raises:
            DataError: A file cannot be read, or has changed since the driver looked at it.
        """
        total = sum(sum(groups) for _, groups in self.files)
        begin, end = total * rank // self.ranks, total * (rank + 1) // self.ranks
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
                yield from self._range(FileShard(file, 0, tuple(chosen)), skipped, left)
                begin += left

    def _range(self, shard: FileShard, skipped: int, count: int) -> Iterator[pa.RecordBatch]:
        for batch in read_groups(shard, self.schema.names):
            part = batch.slice(skipped, count)
            skipped = max(0, skipped - batch.num_rows)
            if part.num_rows:
                count -= part.num_rows
                columns = [part.column(field.name).cast(field.type) for field in self.schema]
                yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
            if not count:
                return
        raise DataError(
            f"{shard.file.path} has lost rows since the driver looked at it",
            expected=f"{count} more of its rows",
            received="the file's end",
            hint="write new data into a new folder",
        )


def fed_files(path: str, frame: Any, columns: tuple[str, ...], ranks: int) -> ParquetRows | None:
    """The files if the ranks can read them by themselves; None if Spark must.

    Spark reads what is no Parquet, very many files, files with different columns, folders by
    column, and types that Spark and Arrow may read differently: times, decimals, maps, structs.

    Args:
        path: Of the files.
        frame: Them as a DataFrame, vectors as arrays.
        columns: Names of its columns in the files.
        ranks: How many share the rows.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    if kind_of_path(path) != "parquet" or not all(_is_plain(f.dataType) for f in frame.schema):
        return None
    files = find_files(path)
    if not files or len(files) > _MOST_FILES or any(file.partition_values for file in files):
        return None
    facts = [parquet_facts(file.path) for file in files]
    there = facts[0][0]
    if any(schema != there for schema, _ in facts) or not set(columns) <= set(there.names):
        return None
    if any(pa.types.is_struct(there.field(name).type) for name in columns):  # vectors
        return None
    types = [field.type for field in to_arrow_schema(frame.schema, timezone="UTC")]
    counted = tuple((file, groups) for file, (_, groups) in zip(files, facts, strict=True))
    return ParquetRows(counted, pa.schema(list(zip(columns, types, strict=True))), ranks)


def _is_plain(kind: Any) -> bool:
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        return _is_plain(kind.elementType)
    plain = (T.IntegralType, T.FloatType, T.DoubleType, T.StringType, T.BinaryType, T.BooleanType)
    return isinstance(kind, plain)
