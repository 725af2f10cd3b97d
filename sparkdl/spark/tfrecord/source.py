"""The data source ``tfrecord`` (Spark 4.0 and newer); importing it loads nothing but pyspark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sparkdl.spark.tfrecord.files import (
        FileGroup,
        TFRecordOptions,
        TFRecordReader,
        TFRecordWriter,
        Written,
    )


class DefaultSource(DataSource):
    """TFRecord files as rows; the options are those of ``sparkdl.read_tfrecords``."""

    @classmethod
    def name(cls) -> str:
        return "tfrecord"

    def schema(self) -> StructType:
        from sparkdl.spark.tfrecord.files import inferred_schema

        return inferred_schema(self._options())

    def reader(self, schema: StructType) -> SourceReader:
        from sparkdl.spark.tfrecord.files import TFRecordReader

        return SourceReader(TFRecordReader(self._options(), schema))

    def writer(self, schema: StructType, overwrite: bool) -> SourceWriter:
        from sparkdl.spark.tfrecord.files import TFRecordWriter

        return SourceWriter(TFRecordWriter(self._options(), schema, overwrite))

    def _options(self) -> TFRecordOptions:
        from sparkdl.spark.tfrecord.files import TFRecordOptions

        given: Any = self.options
        return TFRecordOptions.of(dict(given))


class SourcePartition(InputPartition):
    """The files of one task, as Spark wants them."""

    def __init__(self, group: FileGroup) -> None:
        self.value = self.group = group


class SourceReader(DataSourceReader):
    """A reader as Spark wants it."""

    def __init__(self, reader: TFRecordReader) -> None:
        self._reader = reader

    def partitions(self) -> Sequence[InputPartition]:
        return [SourcePartition(group) for group in self._reader.groups()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SourcePartition):  # else Spark's stand-in for no partitions at all
            yield from self._reader.read(partition.group)


class SourceMessage(WriterCommitMessage):
    """The files that a task wrote, in the message that Spark wants."""

    def __init__(self, written: Written) -> None:
        self.written = written


class SourceWriter(DataSourceArrowWriter):
    """A writer as Spark wants it."""

    def __init__(self, writer: TFRecordWriter) -> None:
        self._writer = writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SourceMessage:
        return SourceMessage(self._writer.write(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writer.commit([m.written for m in messages if isinstance(m, SourceMessage)])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writer.abort()
