"""The data source ``tfrecord``; importing it loads nothing but pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from sparkdl.spark.tfrecord.options import Options
    from sparkdl.spark.tfrecord.reading import TFRecordReader
    from sparkdl.spark.tfrecord.writing import TFRecordWriter


class DefaultSource(DataSource):
    """TFRecord files as rows; the options are those of ``sparkdl.read_tfrecords``."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "tfrecord"

    def schema(self) -> StructType:
        """The schema that the first records ask for."""
        from sparkdl.spark.tfrecord.reading import inferred_schema

        return inferred_schema(self._options())

    def reader(self, schema: StructType) -> TFRecordReader:
        """Reads files as rows of ``schema``."""
        from sparkdl.spark.tfrecord.reading import TFRecordReader

        return TFRecordReader(self._options(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> TFRecordWriter:
        """Writes rows of ``schema`` to files."""
        from sparkdl.spark.tfrecord.writing import TFRecordWriter

        return TFRecordWriter(self._options(), schema, overwrite)

    def _options(self) -> Options:
        from sparkdl.spark.tfrecord.options import Options

        given: Any = self.options
        return Options.of(dict(given))
