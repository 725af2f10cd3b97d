"""Writes TFRecord files, for a data source or for a stage."""

from __future__ import annotations

import gzip
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from sparkdl.data.feed import size_of
from sparkdl.data.shards import NO_VALUE
from sparkdl.data.tfrecord.blocks import ENDINGS
from sparkdl.data.tfrecord.decoding import check_schema
from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.errors import ConfigError
from sparkdl.files import streams
from sparkdl.files.listing import escaped
from sparkdl.files.streams import create_output
from sparkdl.process.closing import Closing
from sparkdl.spark.session.versions import arrow_schema_of
from sparkdl.spark.tfrecord.options import TFRecordOptions

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Written:
    """The files that a task wrote: paths from its own folder on, and where that is."""

    folder: str
    files: tuple[str, ...]


class TFRecordWriter:
    """Each task writes into a folder of its own; only the commit shows the files.

    A task that failed, or was started twice, leaves nothing that is seen.
    """

    def __init__(self, options: TFRecordOptions, schema: T.StructType, overwrite: bool) -> None:
        self._options, self._overwrite = options, overwrite
        if len(options.paths) != 1:
            raise ConfigError(
                "TFRecords are written to one folder", expected="a path",
                received=str(options.paths),
            )  # fmt: skip
        missing = [name for name in options.partition_by if name not in schema.names]
        if missing or len(options.partition_by) == len(schema.fields):
            raise ConfigError(
                "partitionBy does not fit the columns",
                expected="some of " + ", ".join(schema.names) + ", but not all",
                received=", ".join(options.partition_by),
            )
        kept = T.StructType([f for f in schema.fields if f.name not in options.partition_by])
        check_schema(arrow_schema_of(kept), options.record_type)
        self._top = options.paths[0].rstrip("/")
        self._job = f"{self._top}/_temporary/{secrets.token_hex(8)}"

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Writes the rows of one task."""
        attempt = secrets.token_hex(8)
        with ExitStack() as stack:
            files = _Files(f"{self._job}/{attempt}", attempt, self._options, stack)
            for batch in batches:
                for folder, rows in _by_folder(batch, self._options.partition_by):
                    files.write(folder, rows)
        return Written(f"{self._job}/{attempt}", tuple(files.names))

    def commit(self, written: Iterable[Written]) -> None:
        """Shows the files of all tasks, and deletes those that were there if asked to."""
        if self._overwrite:
            self._clear()
        for one in written:
            for name in one.files:
                streams.move(f"{one.folder}/{name}", f"{self._top}/{name}")
        self.abort()
        create_output(f"{self._top}/_SUCCESS").close()

    def abort(self) -> None:
        """Deletes what the tasks wrote, but what was committed."""
        streams.delete_folder(self._job)
        place = streams.place_of(f"{self._top}/_temporary")
        from pyarrow import fs

        left = place.system.get_file_info(fs.FileSelector(place.inner, allow_not_found=True))
        if not left:
            streams.delete_folder(f"{self._top}/_temporary")

    def _clear(self) -> None:
        from pyarrow import fs

        place = streams.place_of(self._top)
        for info in place.system.get_file_info(fs.FileSelector(place.inner, allow_not_found=True)):
            name = info.path.rstrip("/").rsplit("/", 1)[-1]
            if name == "_temporary":
                continue
            path = f"{self._top}/{name}"
            folder = info.type == fs.FileType.Directory
            (streams.delete_folder if folder else streams.delete_file)(path)


class _Files:
    """The files that a task writes, one or several in each folder."""

    def __init__(self, top: str, attempt: str, options: TFRecordOptions, stack: ExitStack) -> None:
        self._top, self._attempt, self._options, self._stack = top, attempt, options, stack
        self._open: dict[str, tuple[BinaryIO, int]] = {}
        self.names: list[str] = []

    def write(self, folder: str, batch: pa.RecordBatch) -> None:
        """Appends rows to the folder's file."""
        fit = int(_BLOCK_BYTES * batch.num_rows // max(1, size_of(batch)))
        step = max(1, min(batch.num_rows, fit))
        limit = self._options.rows_per_file
        start = 0
        while start < batch.num_rows:
            file, rows = self._open.get(folder) or (self._create(folder), 0)
            count = min(step, batch.num_rows - start)
            if limit is not None:
                count = min(count, limit - rows)
            file.write(encode_batch(batch.slice(start, count), self._options.record_type))
            start += count
            self._open[folder] = file, rows + count
            if limit is not None and rows + count >= limit:
                file.close()
                del self._open[folder]

    def _create(self, folder: str) -> BinaryIO:
        codec = self._options.codec or "none"
        name = f"part-{len(self.names):05d}-{self._attempt}.tfrecord{ENDINGS[codec]}"
        path = f"{folder}/{name}" if folder else name
        raw = self._stack.enter_context(create_output(f"{self._top}/{path}"))
        self.names.append(path)
        if codec == "gzip":
            packed = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0)
            return cast(BinaryIO, self._stack.enter_context(packed))
        if codec == "zlib":
            return cast(BinaryIO, self._stack.enter_context(_Deflated(raw)))
        return raw


class _Deflated(Closing):
    """Writes a zlib stream."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._packer = raw, zlib.compressobj()

    def write(self, data: memoryview) -> None:
        self._raw.write(self._packer.compress(data))

    def close(self) -> None:
        if not self._raw.closed:
            self._raw.write(self._packer.flush())
            self._raw.close()


def _by_folder(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each combination of values, with the folder that says these."""
    if not names:
        yield "", batch
        return
    columns = [batch.column(name).cast(pa.string()) for name in names]
    folders = pc.binary_join_element_wise(
        *(pc.fill_null(column, NO_VALUE) for column in columns), "\x00"
    ).dictionary_encode()
    kept = batch.select([name for name in batch.schema.names if name not in names])
    for number, text in enumerate(folders.dictionary.to_pylist()):
        values = zip(map(escaped, names), map(escaped, text.split("\x00")), strict=True)
        folder = "/".join(map("=".join, values))
        yield folder, kept.filter(pc.equal(folders.indices, number))
