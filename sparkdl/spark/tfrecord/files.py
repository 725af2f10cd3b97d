"""Reads and writes TFRecord files, in a data source or a stage, as its options say.

Reader and writer have no session, on the driver neither.
"""

from __future__ import annotations

import gzip
import io
import json
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from sparkdl.data.feed import size_of
from sparkdl.data.shards import NO_VALUE, FolderTypes, deal, file_blocks, folder_column
from sparkdl.data.tfrecord.blocks import ENDINGS, Codec, codec_of
from sparkdl.data.tfrecord.decoding import RecordType, check_schema, decode_block
from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.data.tfrecord.inference import SchemaInference
from sparkdl.errors import ConfigError, DataError, ResourceError, UnknownNameError
from sparkdl.files import streams
from sparkdl.files.listing import FoundFile, escaped, find_files, fits
from sparkdl.files.streams import create_output, open_input
from sparkdl.process.closing import Closing
from sparkdl.spark.session.versions import (
    arrow_schema_of,
    map_in_arrow,
    spark_schema_of,
    spark_type_of,
    spark_version,
)

RECORD_TYPES: dict[str, RecordType] = {
    "example": "Example",
    "sequenceexample": "SequenceExample",
    "bytearray": "ByteArray",
}
_KNOWN = (
    "path",
    "paths",
    "recordType",
    "codec",
    "compression",
    "verifyCrc",
    "inferRows",
    "binaryFeatures",
    "maxPartitionBytes",
    "batchRows",
    "partitionBy",
    "rowsPerFile",
    "pathGlobFilter",
    "recursiveFileLookup",
    "timeZone",
    "inferFolders",
)


@dataclass(frozen=True)
class TFRecordOptions:
    """The user's words in ``.option(...)``; the names are without case.

    Args:
        paths: Files, folders or patterns.
        codec: ``codec`` or ``compression``; None when it is not said.
        verify_crc: ``verifyCrc``: whether the data of each record are held against their CRC.
        infer_rows: ``inferRows``: records that the schema is inferred from.
        binary_features: ``binaryFeatures``: names, divided by commas, of texts that are binary.
        partition_bytes: ``maxPartitionBytes``: bytes of files that a task reads, but whole files.
        batch_rows: ``batchRows``: rows in a batch at most.
        partition_by: ``partitionBy``: columns, divided by commas, that become folders.
        rows_per_file: ``rowsPerFile``: rows after which a task begins another file.
        name_pattern: ``pathGlobFilter``: the names of files that are read, as ``*.tfrecord``.
        recursive: ``recursiveFileLookup``: whether files of all folders below count, which
            then give no columns; otherwise see :func:`sparkdl.files.listing.find_files`.
        folder_types: ``timeZone`` and ``inferFolders``.
    """

    paths: tuple[str, ...]
    record_type: RecordType = "Example"
    codec: Codec | None = None
    verify_crc: bool = True
    infer_rows: int = 1000
    binary_features: tuple[str, ...] = ()
    partition_bytes: int = 128 << 20
    batch_rows: int = 10_000
    partition_by: tuple[str, ...] = ()
    rows_per_file: int | None = None
    name_pattern: str | None = None
    recursive: bool = False
    folder_types: FolderTypes = field(default_factory=FolderTypes)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> TFRecordOptions:
        """The options as Spark hands them over.

        Raises:
            ConfigError: An option that is unknown or has a value that cannot be used.
        """
        given = {key.lower(): value for key, value in options.items()}
        known = {name.lower() for name in _KNOWN}
        for key in options:
            if key.lower() not in known:
                raise UnknownNameError("option of the data source tfrecord", key, _KNOWN)
        paths = json.loads(given["paths"]) if "paths" in given else [given.get("path", "")]
        if not all(paths):
            raise ConfigError(
                "no path for TFRecord files",
                expected=".load(path), .save(path) or .option('path', path)", received="none",
            )  # fmt: skip
        kind = given.get("recordtype", "Example")
        if kind.lower() not in RECORD_TYPES:
            raise UnknownNameError("recordType", kind, RECORD_TYPES.values())
        codec = given.get("codec", given.get("compression"))
        rows = _number(given, "rowsperfile", 0)
        infers = _truth(given, "inferfolders", True)
        return cls(
            tuple(paths), RECORD_TYPES[kind.lower()], None if codec is None else codec_of(codec),
            _truth(given, "verifycrc", True), _number(given, "inferrows", 1000) or 1,
            _names(given, "binaryfeatures"), _number(given, "maxpartitionbytes", 128 << 20),
            _number(given, "batchrows", 10_000) or 1, _names(given, "partitionby"), rows or None,
            given.get("pathglobfilter"), _truth(given, "recursivefilelookup", False),
            FolderTypes(given.get("timezone"), spark_version() >= (4, 1), infers),
        )  # fmt: skip


def _names(given: Mapping[str, str], key: str) -> tuple[str, ...]:
    text = given.get(key, "").strip()
    if text.startswith("["):
        return tuple(json.loads(text))
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _number(given: Mapping[str, str], key: str, default: int) -> int:
    text = str(given.get(key, default))
    if not text.isdecimal():
        raise ConfigError(f"option {key} is no number", expected="0 or more", received=repr(text))
    return int(text)


def _truth(given: Mapping[str, str], key: str, default: bool) -> bool:
    text = str(given.get(key, default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(
            f"option {key} says yes or no", expected="true or false", received=repr(text)
        )
    return text == "true"


FileGroup = tuple[FoundFile, ...]
"""Files that one task reads."""


def files_of(options: TFRecordOptions) -> list[FoundFile]:
    """All files to read.

    Raises:
        ResourceError: There are none at a path, or the options leave none.
    """
    deep = options.recursive
    found = [file for path in options.paths for file in find_files(path, recursive=deep)]
    pattern = options.name_pattern
    files = [f for f in found if pattern is None or fits(f.inner.rsplit("/", 1)[-1], pattern)]
    if deep:
        # without its folders the path gives no columns
        files = [replace(file, inner=file.inner.rsplit("/", 1)[-1]) for file in files]
    if not files:
        raise ResourceError(
            f"no files at {', '.join(map(repr, options.paths))} that the options leave",
            expected=f"names such as {options.name_pattern or '*'!r}, "
            + ("in any folder below" if deep else "in the folder itself, or below name=value"),
            received=f"{len(found)} files, such as {found[0].inner!r}",
            hint="pathGlobFilter and recursiveFileLookup choose files",
        )
    return files


_FILES_LOOKED_AT = 16


def inferred_schema(options: TFRecordOptions) -> T.StructType:
    """The schema of the first records of some files, and of the folders' columns.

    Up to 16 files, spread over all, share the ``inferRows`` records that are looked at.
    """
    files = files_of(options)
    chosen = [
        files[i]
        for i in sorted({n * len(files) // _FILES_LOOKED_AT for n in range(_FILES_LOOKED_AT)})
    ]
    inference = SchemaInference(options.record_type, options.binary_features)
    for file in chosen:
        with open_input(file.path) as stream:
            blocks = file_blocks(stream, file.path, options.codec, options.verify_crc)
            inference.look(blocks, max(1, options.infer_rows // len(chosen)))
    schema = inference.schema()
    if not len(schema):
        raise DataError(
            "no schema can be inferred", expected="a record with a value in one of the files",
            received=f"none in {len(chosen)} of {len(files)} files",
            hint="spark.read.format('tfrecord').schema(...)",
        )  # fmt: skip
    fields = spark_schema_of(schema).fields
    return T.StructType(with_folders(fields, files, options.folder_types, exact=False))


def with_folders(
    fields: Sequence[T.StructField], files: Sequence[FoundFile], types: FolderTypes, *, exact: bool
) -> list[T.StructField]:
    """The columns of files and of their folders, which go before those, as in Spark."""
    values: dict[str, set[str]] = {}
    for file in files:
        for name, value in file.partition_values.items():
            values.setdefault(name, set()).add(value)
    key = str if exact else str.lower
    folders = {key(n): T.StructField(n, spark_type_of(types.of(v))) for n, v in values.items()}
    return [folders.pop(key(field.name), field) for field in fields] + [*folders.values()]


class TFRecordReader:
    """Reads the files, some in each task, as Arrow batches of the schema."""

    def __init__(self, options: TFRecordOptions, schema: T.StructType) -> None:
        self._options, self._schema = options, schema

    def groups(self) -> list[FileGroup]:
        """The files in groups of about ``maxPartitionBytes``."""
        files = files_of(self._options)
        folders = {name for file in files for name in file.partition_values}
        records = [field for field in self._schema.fields if field.name not in folders]
        check_schema(arrow_schema_of(T.StructType(records)), self._options.record_type)
        total = sum(file.size_bytes for file in files)
        groups = max(1, -(-total // max(1, self._options.partition_bytes)))
        dealt = deal(files, [file.size_bytes for file in files], min(groups, len(files)))
        return [tuple(group) for group in dealt if group]

    def read(self, group: FileGroup) -> Iterator[pa.RecordBatch]:
        """The rows of a task's files."""
        options = self._options
        schema, zone = arrow_schema_of(self._schema), options.folder_types.zone
        for file in group:
            folders = file.partition_values
            own = pa.schema([field for field in schema if field.name not in folders])
            with open_input(file.path) as stream:
                for block in file_blocks(stream, file.path, options.codec, options.verify_crc):
                    for start in range(0, len(block), options.batch_rows):
                        part = block.slice(start, start + options.batch_rows)
                        batch = decode_block(part, own, options.record_type)
                        arrays = [
                            folder_column(folders[kind.name], kind, len(part), zone)
                            if kind.name in folders
                            else batch.column(kind.name)
                            for kind in schema
                        ]
                        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


_WHOLE_FILES_LOOKED_AT, _RECORDS_LOOKED_AT = 4, 1000
_BATCH_ROWS = 10_000


def read_whole_files(spark: Any, path: str) -> Any:
    """The Examples of files as a DataFrame; each file is in the memory of its task as a whole.

    The schema is that of the first records of up to four files, which a job of Spark's looks at.
    Spark reads no file of more than 2 GB so, and folders give no columns.

    Raises:
        DataError: No record has a value.
    """
    contents = spark.read.format("binaryFile").load(path).select("path", "content")
    first = map_in_arrow(contents.limit(_WHOLE_FILES_LOOKED_AT), _infer, "arrow binary").head()
    found = pa.schema([]) if first is None else pa.ipc.read_schema(pa.py_buffer(first["arrow"]))
    if not len(found):
        raise DataError(
            "no schema can be inferred", expected="a record with a value in one of the first files",
            received=f"none in the files at {path!r}",
        )  # fmt: skip
    schema = spark_schema_of(found)
    arrow_schema = arrow_schema_of(schema)

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for name, stream in _contents(batches):
            for block in file_blocks(stream, name):
                for start in range(0, len(block), _BATCH_ROWS):
                    part = block.slice(start, start + _BATCH_ROWS)
                    yield decode_block(part, arrow_schema, "Example")

    return map_in_arrow(contents, decode, schema)


def _contents(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, io.BytesIO]]:
    for batch in batches:
        for name, content in zip(batch["path"], batch["content"], strict=True):
            yield name.as_py(), io.BytesIO(content.as_py())


def _infer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The schema, in Arrow's own bytes."""
    inference = SchemaInference("Example")
    for name, stream in _contents(batches):
        inference.look(file_blocks(stream, name), _RECORDS_LOOKED_AT)
    content = inference.schema().serialize().to_pybytes()
    yield pa.RecordBatch.from_pydict({"arrow": pa.array([content], pa.binary())})


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
