"""Rows that each worker reads from files by itself: no row goes through Spark.

The driver deals the files to the workers by size; a Parquet file falls into its row groups where
there are fewer files than it takes to deal evenly. A worker reads its shards in blocks of some
megabytes into the same columns as rows from Spark, in memory or spilled to its disk, so an epoch
reads no file again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from sparkdl.data import DataSpec
from sparkdl.data.plain_arrow import FileColumns, unwrapped
from sparkdl.data.shards import Pieces, deal, file_blocks, folder_column, read_files
from sparkdl.data.tfrecord.decoding import decode_block
from sparkdl.errors import ConfigError, DataError, ResourceError
from sparkdl.files.file_system import NoFileSystemError
from sparkdl.files.listing import FoundFile, FoundTable, is_hidden, table_at
from sparkdl.files.storage import exists, list_files
from sparkdl.files.streams import is_local, open_input, place_of
from sparkdl.spark.files import files_for_workers, path_for_workers
from sparkdl.spark.forms.arrow_files import (
    FileShard,
    arrow_facts,
    arrow_pieces,
    parquet_facts,
    parquet_footer,
    parquet_pieces,
    read_arrow,
    read_numbered,
)
from sparkdl.spark.forms.wire import ONES, no_type
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.versions import (
    arrow_fields_of,
    arrow_schema_of,
    condition_of,
    folder_types_of,
    map_in_arrow,
    spark_fields_of,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructField

FileKind = Literal["parquet", "arrow", "tfrecord"]
_KINDS: dict[FileKind, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq", ".parq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "tfrecord": (".tfrecord", ".tfrec"),
}
"""The ends of the names of files of each kind."""
ENDS = tuple(end for ends in _KINDS.values() for end in ends)

_FILES_PER_WORKER = 4
"""With fewer files for each worker, row groups are dealt instead."""
_FILES_LOOKED_AT = 100
"""At most this many files of this machine are searched for what Spark's reader fails on."""
_MISSING = "PATH_NOT_FOUND"
"""Spark's name for the condition."""


@dataclass(frozen=True)
class FileSet:
    """Files of one kind that hold the rows of a fit.

    Args:
        schema: Names and Arrow types of the columns.
        exact: See :class:`sparkdl.data.plain_arrow.FileColumns`.
    """

    kind: FileKind
    files: tuple[FoundFile, ...]
    schema: pa.Schema
    role: int = 0
    exact: bool = True

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
        schema, exact: As for :class:`FileSet`.
        split: Share of the training rows that is used for validation instead.
    """

    kind: FileKind
    hands: tuple[tuple[FileShard, ...], ...]
    schema: pa.Schema
    split: float = 0.0
    seed: int = 0
    exact: bool = True

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
        return cls(first.kind, tuple(map(tuple, hands)), first.schema, split, seed, first.exact)

    def batches(
        self, rank: int, spec: DataSpec, readers: int | None = None
    ) -> Generator[pa.RecordBatch]:
        """A worker's rows, with the columns of ``spec`` and their roles.

        Args:
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
        if self.kind != "arrow" or not all(is_local(shard.file.path) for shard in shards):
            yield from read_files([partial(self._open, shard, spec) for shard in shards], readers)
            return
        for (file, _), parts in groupby(shards, lambda shard: (shard.file, shard.role)):
            first, *others = parts  # a file that is mapped is opened once for all of them
            of = {number: part for part in (first, *others) for number in part.row_groups or ()}
            for number, batch in read_numbered(file.path, [*of] or None, self._columns(file, spec)):
                yield of.get(number, first), batch

    def _columns(self, file: FoundFile, spec: DataSpec) -> FileColumns:
        others = {spec.role_column, ONES, *file.partition_values}
        return FileColumns([n for n in spec.columns if n not in others], self.schema, self.exact)

    def _open(self, shard: FileShard, spec: DataSpec) -> Pieces[tuple[FileShard, pa.RecordBatch]]:
        columns = self._columns(shard.file, spec)
        pieces: Pieces[pa.RecordBatch]
        if self.kind == "arrow":
            pieces = arrow_pieces(shard.file.path, shard.row_groups, columns)
        elif self.kind == "parquet":
            pieces = [piece.read for piece in parquet_pieces(shard, columns)]
        else:
            pieces = [partial(_records, shard, self.schema, columns.names)]
        return [partial(_of_shard, shard, read) for read in pieces]


def _of_shard(
    shard: FileShard, read: Callable[[], Iterator[pa.RecordBatch]]
) -> Iterator[tuple[FileShard, pa.RecordBatch]]:
    for batch in read():
        yield shard, batch


def _records(shard: FileShard, schema: pa.Schema, own: Sequence[str]) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([schema.field(name) for name in own])
    with open_input(shard.file.path) as stream:
        for block in file_blocks(stream, shard.file.path):
            yield decode_block(block, schema, "Example")


def _column(batch: pa.RecordBatch, name: str, shard: FileShard, schema: pa.Schema) -> pa.Array:
    if name == ONES:
        return pa.array(np.ones(batch.num_rows, np.float32))
    folders = shard.file.partition_values
    if name in folders:
        return folder_column(folders[name], schema.field(name), batch.num_rows)
    column, kind = batch.column(name), dict(zip(schema.names, schema.types, strict=True)).get(name)
    truth = kind == pa.bool_() and pa.types.is_integer(column.type)  # of a bool8, 5 is true
    return column.cast(kind) if truth else column


def _row_groups(shard: FileShard) -> Iterator[FileShard]:
    metadata = parquet_footer(shard.file.path)[0]
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


def kind_of_path(path: str) -> FileKind:
    """The kind of the files, by their names.

    Raises:
        ConfigError: Their names do not say it.
    """
    named = _kind_of_name(path.rstrip("/*").rsplit("/", 1)[-1])
    if named is not None:
        return named
    try:
        files = [file.path for file in files_for_workers(path)]
    except NoFileSystemError as error:
        if (named := _kind_of_name(path)) is not None:
            return named
        try:
            files = list_files(path, "")  # through the session's own, which knows no patterns
        except ResourceError:
            raise error from None
    names = [file.rsplit("/", 1)[-1] for file in files]
    kinds = {_kind_of_name(name) for name in names if not is_hidden(name)}
    if len(kinds) == 1 and (kind := kinds.pop() or _kind_inside(files[0])) is not None:
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


def _kind_inside(path: str) -> FileKind | None:
    """The kind of a file whose name does not say it, as Hive's."""
    with contextlib.suppress(ResourceError), open_input(path) as stream:
        begin = stream.read(6)
        return "parquet" if begin[:4] == b"PAR1" else "arrow" if begin == b"ARROW1" else None
    return None


def looks_like_files(name: str) -> bool:
    """Whether a text that is no column's name may be a path."""
    if "/" in name or _kind_of_name(name) is not None:
        return True
    try:
        return bool(files_for_workers(name))
    except (ResourceError, DataError):
        return False


def _kind_of_name(name: str) -> FileKind | None:
    name = name.lower()
    for kind, (within, *endings) in _KINDS.items():
        if within in name or any(name.endswith(ending) for ending in endings):
            return kind
    return None


@dataclass(frozen=True)
class FileFrame:
    """Files as a DataFrame of Spark, which tells their schema and reads rows if it is asked to.

    Args:
        frame: All columns that Spark has types for.
        task: What reads the files where Spark's own reader cannot.
        lacking: Each of the other columns -> the error for its use.
    """

    frame: Any
    task: _FilesTask | None = None
    lacking: Mapping[str, DataError] = field(default_factory=dict)

    def of(self, columns: Iterable[str]) -> Any:
        """A frame that looks at no other columns than these."""
        if self.task is None:
            return self.frame
        fields = [field for field in self.frame.schema if field.name in {*columns}]
        return _frame_by(self.frame.sparkSession, self.task, fields)


def frame_of_files(spark: Any, path: str) -> FileFrame:
    """The files as a DataFrame.

    Raises:
        ResourceError: There are no files.
        DataError: Arrow files that cannot be read.
    """
    from pyspark.errors import AnalysisException, PySparkException

    if (table := table_of(path)) is not None:
        return FileFrame(_frame_of_table(spark, path, table))
    kind = kind_of_path(path)
    if kind == "arrow":
        return _read_by_tasks(spark, path, kind)
    if kind == "parquet":
        try:
            frame = spark.read.parquet(path)
            fields = list(frame.schema.fields)
        except Exception as error:  # of Spark 3.5 also the JVM's own, of the job that looks
            condition = condition_of(error) if isinstance(error, PySparkException) else ""
            if condition == _MISSING:
                raise ResourceError(
                    f"no files at {path!r}",
                    expected="a file, a folder with files, or a pattern such as '/data/*.parquet'",
                    received=str(error).partition("\n")[0],
                ) from None
            if condition == "COLUMN_ALREADY_EXISTS":
                raise same_names(f"files at {path!r}", str(error).partition("\n")[0]) from None
            with contextlib.suppress(ResourceError):
                return _read_by_tasks(spark, path, kind)
            raise ResourceError(
                f"{path!r} cannot be read", expected="files that Spark or pyarrow can read",
                received=_said(error),
            ) from error  # fmt: skip
        if _is_beyond_spark(path):
            return _read_by_tasks(spark, path, kind, fields)
        return FileFrame(frame)
    from sparkdl.spark.tfrecord.files import TFRecordOptions, inferred_schema, read_whole_files
    from sparkdl.spark.tfrecord.functions import read_tfrecords

    schema = None
    try:
        if is_connect(spark):  # not this process looks for files, but Spark's server
            place_of(path_for_workers(path))
        else:
            files_for_workers(path)
            types = folder_types_of(spark)
            schema = inferred_schema(TFRecordOptions((path_for_workers(path),), folder_types=types))
    except NoFileSystemError as not_here:  # nor will Python find it where Spark runs the source
        try:
            return FileFrame(read_whole_files(spark, path))
        except AnalysisException as error:
            if condition_of(error) != _MISSING:
                raise
            raise not_here from None
    return FileFrame(read_tfrecords(spark, path, schema))


def _said(error: Exception) -> str:  # the first line of an error of Java's tells nothing
    return " ".join(str(error).split("\n")[:2])[:300]


def _is_beyond_spark(path: str) -> bool:
    """Whether a Parquet file has what Spark's reader fails on (half floats, Brotli), or reads in
    another order (permuted tensors). Of files elsewhere only the first one is searched."""
    try:
        files = [file.path for file in files_for_workers(path)]
        looked = files[:_FILES_LOOKED_AT] if is_local(files[0]) else files[:1]
        return any(_has_beyond_spark(*parquet_footer(file)) for file in looked)
    except (ResourceError, DataError, RuntimeError):
        return False


def _has_beyond_spark(metadata: Any, schema: pa.Schema) -> bool:
    groups = [metadata.row_group(0)] if metadata.num_row_groups else []
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    # "UNKNOWN" is the older LZ4, of which Java's writer alone makes what Spark reads
    odd = {"BROTLI"} if str(metadata.created_by).startswith("parquet-mr") else {"BROTLI", "UNKNOWN"}
    permuted = any(getattr(kind, "permutation", None) for kind in schema.types)
    packed = any(column.compression in odd for column in columns)
    return packed or permuted or "halffloat" in str(schema.types)


def _read_by_tasks(
    spark: Any, path: str, kind: FileKind, fields: list[StructField] | None = None
) -> FileFrame:
    """Files that tasks read in Python; ``fields``: None for those of the first file."""
    from sparkdl.spark.tfrecord.files import with_folders

    files = files_for_workers(path)
    there = (arrow_facts if kind == "arrow" else parquet_facts)(files[0].path)[0]
    types, known = folder_types_of(spark), spark_fields_of(there)
    known = [field for field in known if there.names.count(field.name) == 1]
    if fields is None:
        fields = with_folders(known, files, types, exact=is_exact(spark))
    task = _FilesTask(tuple(files), kind, is_exact(spark), pa.schema([]), types.zone)
    lost = [column for column in there if column.name not in [found.name for found in known]]
    lacking = {column.name: no_type(column.name, str(column.type)) for column in lost}
    return FileFrame(_frame_by(spark, task, fields), task, lacking)


def same_names(where: str, received: str) -> DataError:
    """The error of columns that the session does not tell apart."""
    return DataError(
        f"{where} have columns with one name", expected="names that differ, and not by capitals",
        received=received, hint="spark.conf.set('spark.sql.caseSensitive', 'true') tells A from a",
    )  # fmt: skip


def is_exact(spark: Any) -> bool:
    """Whether ``a`` is not the column ``A``."""
    return str(spark.conf.get("spark.sql.caseSensitive")).lower() == "true"


def _frame_by(spark: Any, task: _FilesTask, fields: list[StructField]) -> Any:
    from pyspark.sql import types as T

    kinds = T.StructType(fields)
    number = len(task.files)
    reads = replace(task, schema=arrow_schema_of(kinds))
    return map_in_arrow(spark.range(0, number, 1, number), reads, kinds)


@dataclass(frozen=True)
class _FilesTask:
    """Reads the files whose numbers a task gets."""

    files: tuple[FoundFile, ...]
    kind: FileKind
    exact: bool
    schema: pa.Schema
    zone: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._rows(self.files[number])

    def _rows(self, file: FoundFile) -> Iterator[pa.RecordBatch]:
        folders = file.partition_values
        names = [name for name in self.schema.names if name not in folders]
        for part in self._read(file, FileColumns(names, self.schema, self.exact)):
            columns = [
                folder_column(folders[kind.name], kind, part.num_rows, self.zone)
                if kind.name in folders
                else _as_spark(file.path, part.column(kind.name), kind)
                for kind in self.schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _read(self, file: FoundFile, columns: FileColumns) -> Iterator[pa.RecordBatch]:
        if self.kind == "arrow":
            yield from read_arrow(file.path, None, columns)
            return
        for piece in parquet_pieces(FileShard(file, file.size_bytes), columns):
            yield from piece.read()


def _as_spark(path: str, column: pa.Array, wanted: pa.Field) -> pa.Array:
    try:
        column = unwrapped(column)
        return column if column.type == wanted.type else column.cast(wanted.type)
    except pa.ArrowException as error:
        raise no_type(wanted.name, f"{str(error)[:200]}, in {path}", value=True) from error


def table_of(path: str) -> FoundTable | None:
    """The table that a path means, or a part of it; None also for what cannot be looked into."""
    with contextlib.suppress(ResourceError):
        return table_at(path_for_workers(path))
    with contextlib.suppress(ResourceError):  # Spark's session may know the file system
        for folder in (path.rstrip("/"), path.rstrip("/").rpartition("/")[0]):
            if exists(f"{folder}/_delta_log"):
                return FoundTable("delta", folder, folder == path.rstrip("/"))
    return None


def _frame_of_table(spark: Any, path: str, table: FoundTable) -> Any:
    """A table that is more than its files, read by Spark's own format for it."""
    kind, within = table.format, f"in {table.folder!r} " if not table.whole else ""
    try:
        if table.whole:
            return spark.read.format(kind).load(path)
        why = "files or folders in it"
    except Exception as error:
        why = _said(error)
    raise ConfigError(
        f"{path!r} is {within}a table of the format {kind!r}, whose files hold deleted rows, too",
        expected=f"a Spark session that can read {kind!r}" if table.whole else "the table's folder",
        received=why,
        hint=f"start the session with the package of {kind!r}, so that spark.read.format("
        f"{kind!r}).load({table.folder!r}) works; then fit takes its DataFrame, or the path. All "
        f"rows in the files, deleted ones too: fit(spark.read.parquet({path!r}))",
    ) from None


def file_set(path: str, frame: Any, role: int) -> FileSet:
    """The files at a path, of which ``frame`` knows the schema.

    Raises:
        NoFileSystemError: Only Spark finds them.
    """
    if (table := table_of(path)) is not None:
        raise NoFileSystemError(
            f"{path!r} is a table of the format {table.format!r}",
            expected="files that are all of the rows", received="files with other rows, too",
        )  # fmt: skip
    kind, files = kind_of_path(path), tuple(files_for_workers(path))
    try:
        _ = parquet_footer(files[0].path) if kind == "parquet" else None
    except DataError as e:  # such as 128 bits of polars, which Spark reads as binary
        raise NoFileSystemError(e.what, expected=e.expected, received=e.received) from e
    return FileSet(kind, files, arrow_fields_of(frame.schema), role, is_exact(frame.sparkSession))
