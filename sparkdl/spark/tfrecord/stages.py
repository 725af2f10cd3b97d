"""TFRecord files in ordinary stages: for Spark 3.5, which takes no data source in Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from sparkdl.spark.session.interpreter import context_of, this_interpreter
from sparkdl.spark.session.versions import whole_batches
from sparkdl.spark.tfrecord.options import Options
from sparkdl.spark.tfrecord.reading import FileGroup, TFRecordReader, inferred_schema
from sparkdl.spark.tfrecord.writing import TFRecordWriter, Written

Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def read_in_stage(spark: Any, options: Mapping[str, str], schema: Any) -> Any:
    """The files as a DataFrame; this process looks for the files, and infers the schema.

    Args:
        spark: The session.
        options: Those of the data source, with ``path`` or ``paths``.
        schema: A StructType or a DDL text; None infers it.
    """
    known = Options.of(options)
    if schema is None:
        kinds = inferred_schema(known)
    elif isinstance(schema, str):
        kinds = spark.createDataFrame([], schema).schema
    else:
        kinds = schema
    reader = TFRecordReader(known, kinds)
    groups = reader.groups()
    numbers = spark.range(0, len(groups), 1, max(1, len(groups)))
    with this_interpreter(context_of(spark)):
        return numbers.mapInArrow(_reading(reader, groups), kinds)


def _reading(reader: TFRecordReader, groups: list[FileGroup]) -> Stage:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader.read(groups[number])

    return read


def write_in_stage(frame: Any, options: Mapping[str, str], *, overwrite: bool) -> None:
    """Writes a DataFrame; the files of all tasks show when the last has ended.

    Args:
        frame: The rows.
        options: Those of the data source, with ``path``.
        overwrite: Whether files that are there go.
    """
    writer = TFRecordWriter(Options.of(options), frame.schema, overwrite)
    try:
        with this_interpreter(context_of(frame.sparkSession)):
            rows = frame.mapInArrow(_writing(writer), "folder string, files string").collect()
    except BaseException:
        writer.abort()
        raise
    writer.commit([Written(row.folder, tuple(json.loads(row.files))) for row in rows])


def _writing(writer: TFRecordWriter) -> Stage:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written = writer.write(whole_batches(batches))
        yield pa.RecordBatch.from_pydict(
            {"folder": [written.folder], "files": [json.dumps(written.files)]}
        )

    return write
