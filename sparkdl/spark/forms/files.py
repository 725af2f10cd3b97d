"""Rows that each worker reads from files by itself: no row goes through Spark.

The driver deals the files to the workers by size; a Parquet file falls into its row groups where
there are fewer files than it takes to deal evenly. A worker reads its shards in blocks of some
megabytes into the same columns as rows from Spark, in memory or spilled to its disk, so an epoch
reads no file again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from sparkdl.data import DataSpec
from sparkdl.data.shards import Pieces, deal, file_blocks, folder_column, read_files
from sparkdl.data.tfrecord.decoding import decode_block
from sparkdl.errors import ConfigError, DataError, ResourceError
from sparkdl.files.arrow_file_system import NoFileSystemError
from sparkdl.files.listing import FoundFile, TableFormat, is_hidden, table_format
from sparkdl.files.storage import list_files
from sparkdl.files.streams import FilePlace, is_local, open_input, place_of
from sparkdl.spark.files.worker_paths import files_for_workers, path_for_workers
from sparkdl.spark.forms.arrow_files import (
    arrow_facts,
    arrow_pieces,
    frame_of_arrow,
    known_to_spark,
)
from sparkdl.spark.forms.wire import ONES
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.versions import arrow_schema_of, condition_of

FileKind = Literal["parquet", "arrow", "tfrecord"]
_KINDS: dict[FileKind, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather"),
    "tfrecord": (".tfrecord",),
}
"""The ends of the names of files of each kind."""

_BLOCK_BYTES = 8 << 20
_WHOLE_BYTES = 128 << 20
"""Row groups of no more are asked of another machine whole, not column by column."""
_FILES_PER_WORKER = 4
"""With fewer files than that, row groups are dealt."""
_MISSING = "PATH_NOT_FOUND"
"""Spark's name for the condition."""


@dataclass(frozen=True)
class FileShard:
    """A file, or some row groups of a Parquet file, or record batches of an Arrow file.

    Args:
        file: The file.
        size_bytes: Of what is to be read.
        row_groups: Which ones; None for all.
        number: The shard's number in the data set, before any dealing.
        role: 0 for rows to train on, 1 for rows to validate on.
    """

    file: FoundFile
    size_bytes: int
    row_groups: tuple[int, ...] | None = None
    number: int = 0
    role: int = 0


@dataclass(frozen=True)
class FileSet:
    """Files of one kind that hold the rows of a fit.

    Args:
        kind: What they are.
        files: All of them.
        schema: Of the columns that records hold, as Arrow types.
        role: Of their rows.
    """

    kind: FileKind
    files: tuple[FoundFile, ...]
    schema: pa.Schema
    role: int = 0

    def shards(self, workers: int) -> list[FileShard]:
        """The parts of the files that can be dealt to ``workers`` workers."""
        shards = [FileShard(file, file.size_bytes, role=self.role) for file in self.files]
        if self.kind != "tfrecord" and len(shards) < _FILES_PER_WORKER * workers:
            parts = _row_groups if self.kind == "parquet" else _record_batches
            shards = [part for shard in shards for part in parts(shard)]
        return [replace(shard, number=number) for number, shard in enumerate(shards)]


@dataclass(frozen=True)
class FileInput:
    """The files that the workers of a fit read.

    Args:
        kind: Of the files.
        hands: The shards of each worker.
        schema: See :class:`FileSet`.
        split: Share of the rows to train on that is validated on.
        seed: Of the choice of these.
    """

    kind: FileKind
    hands: tuple[tuple[FileShard, ...], ...]
    schema: pa.Schema
    split: float = 0.0
    seed: int = 0

    @classmethod
    def dealt(cls, sets: Sequence[FileSet], workers: int, split: float, seed: int) -> FileInput:
        """Deals the shards of each set to the workers, by size."""
        hands: list[list[FileShard]] = [[] for _ in range(workers)]
        for files in sets:
            shards = files.shards(workers)
            sizes = [shard.size_bytes for shard in shards]
            for hand, more in zip(hands, deal(shards, sizes, workers), strict=True):
                hand.extend(more)
        first = sets[0]
        return cls(first.kind, tuple(map(tuple, hands)), first.schema, split, seed)

    def batches(
        self, rank: int, spec: DataSpec, readers: int | None = None
    ) -> Generator[pa.RecordBatch]:
        """A worker's rows, with the columns of ``spec`` and their roles.

        Args:
            rank: Of the worker.
            spec: The columns.
            readers: See :func:`sparkdl.data.shards.read_files`; of mapped files there are none.
        """
        random = np.random.default_rng()
        before = None
        with contextlib.closing(self._read(self.hands[rank], spec, readers)) as found:
            for shard, batch in found:
                if shard is not before:
                    random = np.random.default_rng((self.seed % 2**64, shard.number))
                    before = shard
                columns = [
                    self._roles(batch.num_rows, shard, random)
                    if name == spec.role_column
                    else _column(batch, name, shard, self.schema)
                    for name in spec.columns
                ]
                yield pa.RecordBatch.from_arrays(columns, names=list(spec.columns))

    def _roles(self, rows: int, shard: FileShard, random: np.random.Generator) -> pa.Array:
        roles = np.full(rows, shard.role, np.int8)
        if not shard.role and self.split > 0:
            roles[random.random(rows) < self.split] = 1
        return pa.array(roles)

    def _read(
        self, shards: Sequence[FileShard], spec: DataSpec, readers: int | None
    ) -> Generator[tuple[FileShard, pa.RecordBatch]]:
        files = [partial(self._open, shard, spec) for shard in shards]
        if self.kind != "arrow" or not all(is_local(shard.file.path) for shard in shards):
            yield from read_files(files, readers)
            return
        for open_file in files:  # what is mapped is there already
            for read in open_file():
                yield from read()

    def _open(self, shard: FileShard, spec: DataSpec) -> Pieces[tuple[FileShard, pa.RecordBatch]]:
        folders = shard.file.partition_values
        wanted = [
            name
            for name in spec.columns
            if name not in (spec.role_column, ONES) and name not in folders
        ]
        pieces: Pieces[pa.RecordBatch]
        if self.kind == "arrow":
            pieces = arrow_pieces(shard.file.path, shard.row_groups, wanted)
        elif self.kind == "parquet":
            pieces = [piece.read for piece in parquet_pieces(shard, wanted)]
        else:
            pieces = [partial(_records, shard, self.schema, wanted)]
        return [partial(_of_shard, shard, read) for read in pieces]


def _of_shard(
    shard: FileShard, read: Callable[[], Iterator[pa.RecordBatch]]
) -> Iterator[tuple[FileShard, pa.RecordBatch]]:
    for batch in read():
        yield shard, batch


def _records(shard: FileShard, schema: pa.Schema, columns: list[str]) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([schema.field(name) for name in columns])
    with open_input(shard.file.path) as stream:
        for block in file_blocks(stream, shard.file.path):
            yield decode_block(block, schema, "Example")


def _column(batch: pa.RecordBatch, name: str, shard: FileShard, schema: pa.Schema) -> pa.Array:
    if name == ONES:
        return pa.array(np.ones(batch.num_rows, np.float32))
    folders = shard.file.partition_values
    if name in folders:
        return folder_column(folders[name], schema.field(name), batch.num_rows)
    return batch.column(name)


def _row_groups(shard: FileShard) -> Iterator[FileShard]:
    import pyarrow.parquet as pq

    with open_input(shard.file.path) as stream:
        metadata = _opened(pq, stream, shard.file.path).metadata
    for number in range(metadata.num_row_groups):
        size = metadata.row_group(number).total_byte_size
        yield replace(shard, size_bytes=size, row_groups=(number,))


def _record_batches(shard: FileShard) -> Iterator[FileShard]:
    if not is_local(shard.file.path):  # to count the rows could take as long as to read them
        yield shard
        return
    rows = arrow_facts(shard.file.path)[1]
    for number, count in enumerate(rows):
        size = shard.size_bytes * count // max(1, sum(rows))
        yield replace(shard, size_bytes=size, row_groups=(number,))


@dataclass(frozen=True)
class ParquetPiece:
    """Row groups of a Parquet file that are read together.

    Args:
        path: Of the file.
        place: Of the file.
        metadata: Its footer.
        groups: The numbers of the row groups.
        columns: Names of the columns that are read.
    """

    path: str
    place: FilePlace
    metadata: Any
    groups: tuple[int, ...]
    columns: list[str]

    @property
    def num_rows(self) -> int:
        """The rows in these row groups."""
        return sum(self.metadata.row_group(number).num_rows for number in self.groups)

    def read(self) -> Iterator[pa.RecordBatch]:
        """Their rows, in blocks of some megabytes."""
        import pyarrow.parquet as pq

        size = sum(self.metadata.row_group(number).total_byte_size for number in self.groups)
        blocks = max(1, round(size / _BLOCK_BYTES))
        step = max(1, min(65536, -(-self.num_rows // blocks)))
        with open_input(self.path, mapped=True, place=self.place) as stream:
            ahead = size <= _WHOLE_BYTES and not self.place.is_local
            file = _opened(pq, stream, self.path, metadata=self.metadata, pre_buffer=ahead)
            try:
                yield from file.iter_batches(
                    step, row_groups=list(self.groups), columns=self.columns, use_threads=False
                )
            except (OSError, pa.ArrowException) as error:
                raise _broken(self.path, error) from error


def parquet_pieces(shard: FileShard, columns: list[str]) -> list[ParquetPiece]:
    """The row groups of a Parquet file, small ones joined, in their order.

    Args:
        shard: The file, and which row groups.
        columns: Names of the columns to read.

    Raises:
        DataError: It cannot be read, lacks a column, or has fewer row groups than the driver saw.
    """
    import pyarrow.parquet as pq

    path = shard.file.path
    place = place_of(path)
    with open_input(path, place=place) as stream:
        file = _opened(pq, stream, path)
        metadata, names = file.metadata, file.schema_arrow.names
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(
            f"{path} has other columns than the files before",
            expected=f"the column {missing[0]!r}",
            received=f"the columns {names}",
        )
    there = metadata.num_row_groups
    numbers = range(there) if shard.row_groups is None else shard.row_groups
    if numbers and max(numbers) >= there:
        raise DataError(
            f"{path} has lost rows since the driver looked at it",
            expected=f"a row group with the number {max(numbers)}",
            received=f"{there} row groups",
            hint="write new data into a new folder",
        )
    joined: list[list[int]] = []
    room = 0
    for number in numbers:
        size = metadata.row_group(number).total_byte_size
        if size > room:
            joined.append([])
            room = _BLOCK_BYTES
        joined[-1].append(number)
        room -= size
    return [ParquetPiece(path, place, metadata, tuple(groups), columns) for groups in joined]


def parquet_facts(path: str) -> tuple[pa.Schema, tuple[int, ...]]:
    """The columns of a Parquet file, and the rows of each of its row groups."""
    import pyarrow.parquet as pq

    with open_input(path) as stream:
        file = _opened(pq, stream, path)
        groups = range(file.metadata.num_row_groups)
        return file.schema_arrow, tuple(file.metadata.row_group(n).num_rows for n in groups)


def _opened(pq: Any, stream: Any, path: str, metadata: Any = None, pre_buffer: bool = False) -> Any:
    try:
        return pq.ParquetFile(stream, metadata=metadata, buffer_size=1 << 20, pre_buffer=pre_buffer)
    except (OSError, pa.ArrowException) as error:
        raise _broken(path, error) from error


def _broken(path: str, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read", expected="a sound Parquet file", received=str(error)[:500]
    )


def kind_of_path(path: str) -> FileKind:
    """The kind of the files, by their names.

    Raises:
        ConfigError: Their names do not say it.
    """
    named = _kind_of_name(path.rstrip("/*"))
    if named is not None:
        return named
    try:
        files = [file.path for file in files_for_workers(path)]
    except NoFileSystemError as error:
        try:
            files = list_files(path, "")  # through the session's own, which knows no patterns
        except ResourceError:
            raise error from None
    names = [file.rsplit("/", 1)[-1] for file in files]
    kinds = {_kind_of_name(name) for name in names if not is_hidden(name)}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return kind
    endings = {name.lower().rsplit(".", 1)[-1] for name in names}
    raise ConfigError(
        f"it cannot be seen what the files at {path!r} are",
        expected="files whose names hold .parquet, .arrow, .feather or .tfrecord, such as "
        "'/data/*.parquet'",
        received=", ".join(sorted(endings)) or "no files",
        hint="name one of the folders in it: each is a part of this DatasetDict of Hugging Face"
        if names == ["dataset_dict.json"]
        else "or read them with Spark: fit(spark.read.format(...).load(path))",
    )


def _kind_of_name(name: str) -> FileKind | None:
    name = name.lower()
    for kind, (within, *endings) in _KINDS.items():
        if within in name or any(name.endswith(ending) for ending in endings):
            return kind
    return None


def frame_of_files(spark: Any, path: str) -> Any:
    """The files as a DataFrame, which tells their schema; it reads rows only if it is asked to.

    Raises:
        ResourceError: There are no files.
    """
    from pyspark.errors import AnalysisException

    table = _table_of(path)
    if table is not None:
        return _frame_of_table(spark, path, table)
    kind = kind_of_path(path)
    if kind == "arrow":
        return frame_of_arrow(spark, path)
    if kind == "parquet":
        try:
            return spark.read.parquet(path)
        except AnalysisException as error:
            if condition_of(error) != _MISSING:
                return _of_known_types(spark, path, error)
            raise ResourceError(
                f"no files at {path!r}",
                expected="a file, a folder with files, or a pattern such as '/data/*.parquet'",
                received=str(error).partition("\n")[0],
            ) from None
    from sparkdl.spark.tfrecord.functions import read_tfrecords
    from sparkdl.spark.tfrecord.reading import read_whole_files

    try:
        if is_connect(spark):  # not this process looks for files, but Spark's server
            place_of(path_for_workers(path))
        else:
            files_for_workers(path)
    except NoFileSystemError as not_here:  # nor will Python find it where Spark runs the source
        try:
            return read_whole_files(spark, path)
        except AnalysisException as error:
            if condition_of(error) != _MISSING:
                raise
            raise not_here from None
    return read_tfrecords(spark, path)


def _of_known_types(spark: Any, path: str, refusal: Exception) -> Any:
    """The columns of Parquet files whose types Spark knows, where it refuses the others.

    Raises:
        Exception: ``refusal``, if the files cannot be looked into, or Spark knows no column.
    """
    try:
        schema = parquet_facts(files_for_workers(path)[0].path)[0]
    except (ResourceError, DataError):
        raise refusal from None
    from pyspark.sql import types as T

    fields = [found for field in schema.remove_metadata() for found in known_to_spark(field)]
    nanoseconds = [f.name for f in schema if getattr(f.type, "unit", "us") == "ns"]
    fields = [field for field in fields if field.name not in nanoseconds]
    if not fields:
        raise refusal
    return spark.read.schema(T.StructType(fields)).parquet(path)


def _table_of(path: str) -> TableFormat | None:
    """The format of the table at a path; None: it is none, or this process cannot look."""
    try:
        return table_format(path_for_workers(path))
    except ResourceError:
        return None


def _frame_of_table(spark: Any, path: str, table: TableFormat) -> Any:
    """A table that is more than its files, read by Spark's own format for it.

    Raises:
        ConfigError: The session has no such format.
    """
    try:
        return spark.read.format(table).load(path)
    except Exception as error:
        raise ConfigError(
            f"{path!r} is a table of the format {table!r}, whose files hold deleted rows, too",
            expected=f"a Spark session that can read {table!r}",
            received=str(error).partition("\n")[0][:300],
            hint=f"start the session with the package of {table!r}, so that spark.read.format("
            f"{table!r}).load(...) works; then fit takes its DataFrame, or the path",
        ) from None


def file_set(path: str, frame: Any, role: int) -> FileSet:
    """The files at a path, of which ``frame`` knows the schema.

    Raises:
        NoFileSystemError: Only Spark finds them.
    """
    table = _table_of(path)
    if table is not None:
        raise NoFileSystemError(
            f"{path!r} is a table of the format {table!r}",
            expected="files that are all of the rows",
            received="files of which some hold deleted rows",
        )
    kind, files = kind_of_path(path), tuple(files_for_workers(path))
    schema = pa.schema([])
    if kind == "tfrecord" or any(file.partition_values for file in files):
        schema = arrow_schema_of(frame.schema)
    return FileSet(kind, files, schema, role)
