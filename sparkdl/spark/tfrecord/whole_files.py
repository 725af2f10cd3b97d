"""TFRecord files that Spark reads, whole: for file systems that only its Hadoop knows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from sparkdl.data.shards import file_blocks
from sparkdl.data.tfrecord.decoding import decode_block
from sparkdl.data.tfrecord.inference import SchemaInference
from sparkdl.errors import DataError
from sparkdl.spark.session.interpreter import context_of, this_interpreter
from sparkdl.spark.session.versions import arrow_schema_of, spark_schema_of

_FILES_LOOKED_AT, _RECORDS_LOOKED_AT = 4, 1000
_BATCH_ROWS = 10_000


def read_whole_files(spark: Any, path: str) -> Any:
    """The Examples of files as a DataFrame; each file is in the memory of its task as a whole.

    The schema is that of the first records of up to four files, which a job of Spark's looks at.
    Spark reads no file of more than 2 GB so, and folders give no columns.

    Raises:
        DataError: No record has a value.
    """
    contents = spark.read.format("binaryFile").load(path).select("path", "content")
    with this_interpreter(context_of(spark)):
        schemas = contents.limit(_FILES_LOOKED_AT).mapInArrow(_infer, "arrow binary")
    first = schemas.head()
    found = pa.schema([]) if first is None else pa.ipc.read_schema(pa.py_buffer(first["arrow"]))
    if not len(found):
        raise DataError(
            "no schema can be inferred",
            expected="a record with a value in one of the first files",
            received=f"none in the files at {path!r}",
        )
    schema = spark_schema_of(found)
    arrow_schema = arrow_schema_of(schema)

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for name, stream in _files(batches):
            for block in file_blocks(stream, name):
                for start in range(0, len(block), _BATCH_ROWS):
                    part = block.slice(start, start + _BATCH_ROWS)
                    yield decode_block(part, arrow_schema, "Example")

    with this_interpreter(context_of(spark)):
        return contents.mapInArrow(decode, schema)


def _files(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, io.BytesIO]]:
    for batch in batches:
        for name, content in zip(batch["path"], batch["content"], strict=True):
            yield name.as_py(), io.BytesIO(content.as_py())


def _infer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The schema, in Arrow's own bytes."""
    inference = SchemaInference("Example")
    for name, stream in _files(batches):
        left = _RECORDS_LOOKED_AT
        for block in file_blocks(stream, name):
            inference.add(block.slice(0, left))
            left -= len(block)
            if left <= 0:
                break
    content = inference.schema().serialize().to_pybytes()
    yield pa.RecordBatch.from_pydict({"arrow": pa.array([content], pa.binary())})
