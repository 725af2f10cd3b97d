"""``read_tfrecords``, ``write_tfrecords`` and ``register_tfrecord``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa

from sparkdl.errors import ResourceError
from sparkdl.files.listing import find_files
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_int, require_name
from sparkdl.spark.files import path_for_workers
from sparkdl.spark.session.frames import column_named, is_vector_column, require_frame
from sparkdl.spark.session.running import context_of, require_running, this_interpreter
from sparkdl.spark.session.versions import (
    condition_of,
    folder_types_of,
    has_data_sources,
    map_in_arrow,
    require_spark,
    whole_batches,
)
from sparkdl.spark.tfrecord.files import (
    TFRecordOptions,
    TFRecordReader,
    TFRecordWriter,
    Written,
    inferred_schema,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def read_in_stage(
    spark: SparkSession, options: Mapping[str, str], schema: StructType | str | None
) -> Any:
    """The files as a DataFrame; this process looks for the files, and infers the schema."""
    known = TFRecordOptions.of(options)
    if schema is None:
        kinds = inferred_schema(known)
    elif isinstance(schema, str):
        kinds = spark.createDataFrame([], schema).schema
    else:
        kinds = schema
    reader = TFRecordReader(known, kinds)
    groups = reader.groups()

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader.read(groups[number])

    return map_in_arrow(spark.range(0, len(groups), 1, max(1, len(groups))), read, kinds)


def write_in_stage(frame: DataFrame, options: Mapping[str, str], *, overwrite: bool) -> None:
    """Writes a DataFrame; the files of all tasks show when the last has ended."""
    writer = TFRecordWriter(TFRecordOptions.of(options), frame.schema, overwrite)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written = writer.write(whole_batches(batches))
        yield pa.RecordBatch.from_pydict(
            {"folder": [written.folder], "files": [json.dumps(written.files)]}
        )

    try:
        rows = map_in_arrow(frame, write, "folder string, files string").collect()
    except BaseException:
        writer.abort()
        raise
    writer.commit([Written(row.folder, tuple(json.loads(row.files))) for row in rows])


SaveMode = Literal["error", "errorifexists", "append", "overwrite", "ignore"]


def register_tfrecord(spark: SparkSession) -> None:
    """Makes the format ``tfrecord`` known to a session.

    Needed where the Python that Spark starts on the driver does not find the module
    ``pyspark_tfrecord`` by itself; to do it twice does no harm.

    Raises:
        ResourceError: PySpark is older than 4.0, or the session was stopped.
    """
    require_spark(
        (4, 0), "the format 'tfrecord'",
        "sparkdl.read_tfrecords and sparkdl.write_tfrecords work with PySpark 3.5, too",
    )  # fmt: skip
    from pyspark.errors import AnalysisException

    from sparkdl.spark.tfrecord.source import DefaultSource

    require_running(spark)
    with this_interpreter(context_of(spark)):
        try:
            spark.dataSource.register(DefaultSource)
        except AnalysisException as error:
            if condition_of(error) != "DATA_SOURCE_ALREADY_EXISTS":  # in Spark 4.0, which found it
                raise


@lists_its_arguments
def read_tfrecords(
    spark: SparkSession,
    path: str | Sequence[str],
    schema: StructType | str | None = None,
    *,
    record_type: str = "Example",
    codec: str | None = None,
    verify_crc: bool = True,
    infer_rows: int = 1000,
    binary_features: Sequence[str] = (),
    max_partition_bytes: int = 128 << 20,
    batch_rows: int = 10_000,
) -> Any:
    """TFRecord files as a DataFrame, without a jar and without TensorFlow.

    Int64List becomes ``bigint``, FloatList ``float``, BytesList ``string``; arrays of them where a
    record has another number of values than one; feature lists of a SequenceExample arrays of
    arrays. A feature that a record lacks is null. Folders such as ``day=3`` become columns. Files
    are read whole by one task each, since the format cannot be entered in the middle.

    Args:
        spark: The session, classic or Connect.
        path: A file, a folder, a pattern, or several of them; the executors read them through
            pyarrow or fsspec.
        schema: A StructType or a DDL text; only its columns are read. None infers it.
        record_type: ``'Example'``, ``'SequenceExample'`` or ``'ByteArray'`` (one column
            ``byteArray`` with the records as they are).
        codec: ``'gzip'``, ``'zlib'``, ``'none'``; None looks at each file's first bytes.
        verify_crc: Whether the data of each record are held against their CRC.
        infer_rows: Records that the schema is inferred from, at the beginnings of up to 16 files.
        binary_features: Names of texts that are binary and not UTF-8.
        max_partition_bytes: Bytes of files for one task.
        batch_rows: Rows that a task decodes at a time, at most.

    Raises:
        ConfigError: An argument that cannot be used.
        ResourceError: The session was stopped.

    >>> df = sparkdl.read_tfrecords(spark, '/data/train-*.tfrecord')  # doctest: +SKIP
    """
    require_running(spark)
    types = folder_types_of(spark)
    options = {
        "timeZone": str(types.zone),
        "inferFolders": str(types.infers).lower(),
        "recordType": record_type,
        "verifyCrc": str(verify_crc).lower(),
        "inferRows": str(infer_rows),
        "binaryFeatures": json.dumps(list(binary_features)),
        "maxPartitionBytes": str(max_partition_bytes),
        "batchRows": str(batch_rows),
    }
    if codec is not None:
        options["codec"] = codec
    paths = [path_for_workers(one) for one in ([path] if isinstance(path, str) else path)]
    if not has_data_sources():
        return read_in_stage(spark, {**options, "paths": json.dumps(paths)}, schema)
    register_tfrecord(spark)
    reader = spark.read.format("tfrecord").options(**options)
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load(paths[0] if isinstance(path, str) else paths)


@lists_its_arguments
def write_tfrecords(
    df: DataFrame,
    path: str,
    mode: SaveMode = "error",
    *,
    record_type: str = "Example",
    codec: str | None = None,
    partition_by: str | Sequence[str] = (),
    rows_per_file: int | None = None,
) -> None:
    """Writes a DataFrame as TFRecord files, with what ``df.write`` cannot do for such a source.

    ``df.write.format('tfrecord')`` knows the modes ``append`` and ``overwrite`` alone; here are all
    of Spark's, folders by column, and ML vectors, which become arrays of floats.

    Args:
        df: The rows. A null leaves its feature out; an empty array is written as one.
        path: A folder.
        mode: ``'error'``, ``'append'``, ``'overwrite'`` or ``'ignore'``: what to do if there are
            files already.
        record_type: ``'Example'``, ``'SequenceExample'`` or ``'ByteArray'``.
        codec: ``'gzip'``, ``'zlib'`` or ``'none'``.
        partition_by: Columns whose values become folders, ``day=3``.
        rows_per_file: Rows after which a task begins another file.

    Raises:
        ConfigError: A column does not fit into a record.
        ResourceError: There are files already, and the mode is ``'error'``; or the session was
            stopped.
    """
    from pyspark.ml.functions import vector_to_array

    require_name("mode", mode, get_args(SaveMode))
    require_frame("write_tfrecords", df)
    require_running(df.sparkSession)
    path = path_for_workers(path)
    if mode in ("error", "errorifexists", "ignore") and _holds_files(path):
        if mode == "ignore":
            return
        raise ResourceError(
            f"there are files at {path!r} already", expected="a folder that is empty or not there",
            received="files", hint="mode='overwrite', 'append' or 'ignore'",
        )  # fmt: skip
    if rows_per_file is not None:
        rows_per_file = require_int("rows_per_file", rows_per_file, 1)
    names = [partition_by] if isinstance(partition_by, str) else list(partition_by)
    for field in df.schema.fields:
        column = column_named(field.name)
        if is_vector_column(field.dataType):
            df = df.withColumn(field.name, vector_to_array(column, "float32"))
        elif field.name in names:  # times are those of the session's zone
            df = df.withColumn(field.name, column.cast("string"))
    options = {"recordType": record_type, "partitionBy": json.dumps(names)}
    if codec is not None:
        options["codec"] = codec
    if rows_per_file is not None:
        options["rowsPerFile"] = str(rows_per_file)
    if not has_data_sources():
        write_in_stage(df, {**options, "path": path}, overwrite=mode == "overwrite")
        return
    register_tfrecord(df.sparkSession)
    writer = df.write.format("tfrecord").options(**options)
    writer.mode("overwrite" if mode == "overwrite" else "append").save(path)


def _holds_files(path: str) -> bool:
    try:
        return bool(find_files(path))
    except ResourceError:
        return False
