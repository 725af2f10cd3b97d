"""Reads TFRecord files, in a data source or a stage; it has no session, on the driver neither."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from sparkdl.data.shards import FolderTypes, deal, file_blocks, folder_column
from sparkdl.data.tfrecord.decoding import check_schema, decode_block
from sparkdl.data.tfrecord.inference import SchemaInference
from sparkdl.errors import DataError, ResourceError
from sparkdl.files.listing import FoundFile, find_files, fits
from sparkdl.files.streams import open_input
from sparkdl.spark.session.versions import (
    arrow_schema_of,
    map_in_arrow,
    spark_schema_of,
    spark_type_of,
)
from sparkdl.spark.tfrecord.options import TFRecordOptions

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
    looked_at = contents.limit(_WHOLE_FILES_LOOKED_AT)
    first = map_in_arrow(looked_at, _infer, "arrow binary").head()
    found = pa.schema([]) if first is None else pa.ipc.read_schema(pa.py_buffer(first["arrow"]))
    if not len(found):
        raise DataError(
            "no schema can be inferred", expected="a record with a value in one of the first files",
            received=f"none in the files at {path!r}",
        )  # fmt: skip
    schema = spark_schema_of(found)
    arrow_schema = arrow_schema_of(schema)

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for name, stream in _files(batches):
            for block in file_blocks(stream, name):
                for start in range(0, len(block), _BATCH_ROWS):
                    part = block.slice(start, start + _BATCH_ROWS)
                    yield decode_block(part, arrow_schema, "Example")

    return map_in_arrow(contents, decode, schema)


def _files(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, io.BytesIO]]:
    for batch in batches:
        for name, content in zip(batch["path"], batch["content"], strict=True):
            yield name.as_py(), io.BytesIO(content.as_py())


def _infer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The schema, in Arrow's own bytes."""
    inference = SchemaInference("Example")
    for name, stream in _files(batches):
        inference.look(file_blocks(stream, name), _RECORDS_LOOKED_AT)
    content = inference.schema().serialize().to_pybytes()
    yield pa.RecordBatch.from_pydict({"arrow": pa.array([content], pa.binary())})
