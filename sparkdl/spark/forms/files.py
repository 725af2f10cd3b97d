"""Rows that each worker reads from files by itself: no row goes through Spark.

The driver deals the files to the workers by size; a Parquet file falls into its row groups where
there are fewer files than it takes to deal evenly. A worker reads its shards in blocks of some
megabytes into the same columns as rows from Spark, in memory or spilled to its disk, so an epoch
reads no file again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from sparkdl.data import DataSpec
from sparkdl.data.shards import deal, file_blocks, folder_column
from sparkdl.data.tfrecord.decoding import decode_block
from sparkdl.errors import ConfigError, DataError, ResourceError
from sparkdl.files.arrow_file_system import NoFileSystemError
from sparkdl.files.storage import list_files
from sparkdl.files.streams import FoundFile, is_local, open_input, place_of
from sparkdl.spark.files.worker_paths import files_for_workers, path_for_workers
from sparkdl.spark.forms.arrow_files import arrow_facts, frame_of_arrow, read_arrow
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

    def batches(self, rank: int, spec: DataSpec) -> Iterator[pa.RecordBatch]:
        """A worker's rows, with the columns of ``spec`` and their roles."""
        for shard in self.hands[rank]:
            random = np.random.default_rng((self.seed % 2**64, shard.number))
            for batch in self._read(shard, spec):
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

    def _read(self, shard: FileShard, spec: DataSpec) -> Iterator[pa.RecordBatch]:
        folders = shard.file.partition_values
        wanted = [
            name
            for name in spec.columns
            if name not in (spec.role_column, ONES) and name not in folders
        ]
        if self.kind == "arrow":
            yield from read_arrow(shard.file.path, shard.row_groups, wanted)
            return
        with open_input(shard.file.path) as stream:
            if self.kind == "parquet":
                yield from _read_parquet(stream, shard, wanted)
                return
            schema = pa.schema([self.schema.field(name) for name in wanted])
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


def _read_parquet(stream: Any, shard: FileShard, columns: list[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    file = _opened(pq, stream, shard.file.path)
    groups = range(file.metadata.num_row_groups)
    chosen = list(groups if shard.row_groups is None else shard.row_groups)
    missing = [name for name in columns if name not in file.schema_arrow.names]
    if missing:
        raise DataError(
            f"{shard.file.path} has other columns than the files before",
            expected=f"the column {missing[0]!r}",
            received=f"the columns {file.schema_arrow.names}",
        )
    sizes = [(g.num_rows, g.total_byte_size) for g in map(file.metadata.row_group, chosen)]
    rows, size = sum(r for r, _ in sizes), sum(s for _, s in sizes)
    step = max(1, min(65536, _BLOCK_BYTES * rows // max(1, size)))
    try:
        yield from file.iter_batches(step, row_groups=chosen, columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise _broken(shard.file.path, error) from error


def parquet_facts(path: str) -> tuple[pa.Schema, tuple[int, ...]]:
    """The columns of a Parquet file, and the rows of each of its row groups."""
    import pyarrow.parquet as pq

    with open_input(path) as stream:
        file = _opened(pq, stream, path)
        groups = range(file.metadata.num_row_groups)
        return file.schema_arrow, tuple(file.metadata.row_group(n).num_rows for n in groups)


def read_groups(shard: FileShard, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Columns of a Parquet file's row groups, in blocks of some megabytes."""
    with open_input(shard.file.path, mapped=True) as stream:
        yield from _read_parquet(stream, shard, columns)


def _opened(pq: Any, stream: Any, path: str) -> Any:
    try:
        return pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
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
    kinds = {_kind_of_name(name) for name in names if name[:1] not in ("_", ".")}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return kind
    endings = {name.lower().rsplit(".", 1)[-1] for name in names}
    raise ConfigError(
        f"it cannot be seen what the files at {path!r} are",
        expected="files whose names hold .parquet, .arrow, .feather or .tfrecord, such as "
        "'/data/*.parquet'",
        received=", ".join(sorted(endings)) or "no files",
        hint="or read them with Spark: fit(spark.read.format(...).load(path))",
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

    kind = kind_of_path(path)
    if kind == "arrow":
        return frame_of_arrow(spark, path)
    if kind == "parquet":
        try:
            return spark.read.parquet(path)
        except AnalysisException as error:
            if condition_of(error) != _MISSING:
                raise
            raise ResourceError(
                f"no files at {path!r}",
                expected="a file, a folder with files, or a pattern such as '/data/*.parquet'",
                received=str(error).partition("\n")[0],
            ) from None
    from sparkdl.spark.tfrecord.functions import read_tfrecords
    from sparkdl.spark.tfrecord.whole_files import read_whole_files

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


def file_set(path: str, frame: Any, role: int) -> FileSet:
    """The files at a path, of which ``frame`` knows the schema.

    Raises:
        NoFileSystemError: Only Spark finds them.
    """
    kind, files = kind_of_path(path), tuple(files_for_workers(path))
    schema = pa.schema([])
    if kind == "tfrecord" or any(file.partition_values for file in files):
        schema = arrow_schema_of(frame.schema)
    return FileSet(kind, files, schema, role)
