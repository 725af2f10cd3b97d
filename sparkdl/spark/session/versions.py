"""The differences between Spark 3.5 and the Sparks after it, each once.

Everything else of the package calls these functions and knows one Spark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from sparkdl.data.feed import size_of
from sparkdl.data.plain_arrow import plain_type
from sparkdl.data.shards import FolderTypes
from sparkdl.errors import ResourceError
from sparkdl.launch.task import batch_to_bytes
from sparkdl.spark.session.running import context_of, this_interpreter

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""The argument of ``DataFrame.mapInArrow``."""
_ROW_BYTES = 8 << 20
"""Bytes of Arrow's tables in one row, where Spark takes or gives tables in no other way."""


class ArrowStage(Protocol):
    """Rows that are computed when they are asked for: a DataFrame or an RDD."""

    def collect(self) -> list[Row]: ...


def spark_version() -> tuple[int, int]:
    """Major and minor version of the installed PySpark, e.g. ``(3, 5)``."""
    import pyspark

    major, minor = pyspark.__version__.split(".")[:2]
    return int(major), int(minor)


def require_spark(version: tuple[int, int], what: str, hint: str) -> None:
    """Returns if PySpark is this version or a newer one.

    Args:
        what: What it is needed for, at the beginning of a sentence.
        hint: What works with older ones.
    """
    if spark_version() < version:
        import pyspark

        wanted = ".".join(map(str, version))
        raise ResourceError(
            f"{what} needs a newer Spark", expected=f"PySpark {wanted} or newer",
            received=f"PySpark {pyspark.__version__}", hint=hint,
        )  # fmt: skip


def has_data_sources() -> bool:
    """Whether Spark takes data sources that are written in Python: from 4.0 on."""
    return spark_version() >= (4, 0)


def has_arrow_functions() -> bool:
    """Whether Spark has functions on Arrow arrays: from 4.1 on."""
    return spark_version() >= (4, 1)


def arrow_stage(
    frame: DataFrame,
    function: ArrowFunction,
    schema: str,
    *,
    barrier: bool = False,
    profile: ResourceProfile | None = None,
) -> ArrowStage:
    """A function on the Arrow batches of every partition, in one stage that is not started yet.

    Args:
        frame: One partition for each task.
        barrier: Whether all tasks start together.
        profile: What each task of the stage is given; None: as the session says.
    """
    stage: ArrowStage
    if profile is None:
        stage = frame.mapInArrow(function, schema, barrier=barrier)
    elif spark_version() >= (4, 0):
        stage = frame.mapInArrow(function, schema, barrier=barrier, profile=profile)
    else:
        # Spark 3.5 gives resources to stages of RDDs alone: here that of the function.
        stage = frame.mapInArrow(function, schema, barrier=barrier).rdd.withResources(profile)
    return stage


def map_in_arrow(frame: DataFrame, function: ArrowFunction, schema: StructType | str) -> Any:
    """``frame.mapInArrow`` of a function of ours, which :func:`this_interpreter` runs."""
    with this_interpreter(context_of(frame.sparkSession)):
        return frame.mapInArrow(function, schema)


def whole_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """On the executor: batches of a stage, of which Spark 3.5 leaves parts out.

    Its JVM sends no offsets for lists that are all empty, and pyarrow of any version crashes where
    it looks at them (``flatten``, ``nbytes``): in arrays of arrays, such as those of a batch whose
    rows have no position.
    """
    return batches if spark_version() >= (4, 0) else map(_whole_batch, batches)


def _whole_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    given = batch.columns
    made = [_whole(column) for column in given]
    if all(new is old for new, old in zip(made, given, strict=True)):
        return batch
    return pa.RecordBatch.from_arrays(made, schema=batch.schema)


def _whole(array: pa.Array) -> pa.Array:
    """An array with the offsets that are missing, or the same array."""
    if not pa.types.is_list(array.type):
        return array
    if not len(array) and not (array.buffers()[1] or ()):
        return pa.array([], array.type)
    values = array.values
    made = _whole(values)
    if made is values:
        return array
    own = array.buffers()[:2]
    return pa.Array.from_buffers(array.type, len(array), own, -1, array.offset, [made])


def condition_of(error: PySparkException) -> str:
    """The name of an error's kind, such as ``PATH_NOT_FOUND``; empty for an error without."""
    named = error.getCondition if spark_version() >= (4, 0) else error.getErrorClass
    return named() or ""


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """Spark's columns as Arrow's; times are of UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if spark_version() >= (4, 1):
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def arrow_type_of(kind: DataType) -> pa.DataType:
    """The same for one type."""
    from pyspark.sql import types as T

    return arrow_schema_of(T.StructType().add("value", kind)).field(0).type


def folder_types_of(spark: SparkSession) -> FolderTypes:
    """How a session types the columns of folders."""
    conf = spark.conf
    zoned = str(conf.get("spark.sql.timestampType")).upper() != "TIMESTAMP_NTZ"
    infers = str(conf.get("spark.sql.sources.partitionColumnTypeInference.enabled")).lower()
    zone = conf.get("spark.sql.session.timeZone") if zoned else ""
    return FolderTypes(zone, spark_version() >= (4, 1), infers == "true")


def spark_schema_of(schema: pa.Schema) -> StructType:
    """Arrow's columns as Spark's; times without a zone stay so."""
    from pyspark.sql.pandas.types import from_arrow_schema

    fields = [field.with_type(plain_type(field.type)) for field in schema]
    return from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=True)


def spark_fields_of(schema: pa.Schema) -> list[StructField]:
    """The same as fields, without the columns whose types Spark lacks."""
    found: list[StructField] = []
    for field in schema.remove_metadata():
        with contextlib.suppress(TypeError, NotImplementedError, ValueError):  # unknown to pyspark
            fields = spark_schema_of(pa.schema([field]))
            arrow_schema_of(fields)
            found += fields
    return found


def arrow_fields_of(schema: StructType) -> pa.Schema:
    """Spark's columns as Arrow's, without those that it cannot give as such."""
    from pyspark.sql import types as T

    found: list[pa.Field] = []
    for field in schema:
        with contextlib.suppress(TypeError, NotImplementedError, ValueError):
            found += arrow_schema_of(T.StructType([field]))
    return pa.schema(found)


def spark_type_of(kind: pa.DataType) -> DataType:
    """The same for one type."""
    return spark_schema_of(pa.schema([("value", kind)]))[0].dataType


def metadata_place(spark: SparkSession) -> Any:
    """The argument of Spark's writers and readers of a stage's Params: the session, before 4.0 a
    context.

    Raises:
        ResourceError: A Connect session of an older Spark, which has no context.
    """
    if spark_version() >= (4, 0):
        return spark
    if "connect" in type(spark).__module__:
        require_spark((4, 0), "a stage of pyspark.ml on Spark Connect", "a classic session")
    return spark.sparkContext


def schema_of_ddl(text: str) -> StructType:
    """Columns of a DDL text; in Spark 3.5 on the driver of a classic session alone."""
    from pyspark.sql import types as T

    if spark_version() >= (4, 0):
        return T.StructType.fromDDL(text)
    return T._parse_datatype_string(text)


def frame_of_table(spark: SparkSession, table: pa.Table) -> Any:
    """``spark.createDataFrame(table)``, which Spark has from 4.0 on.

    In Spark 3.5 the rows travel as Arrow's bytes, which tasks read.
    """
    if spark_version() >= (4, 0):
        return spark.createDataFrame(table)
    schema = spark_schema_of(table.schema)
    wanted = arrow_schema_of(schema)
    parts = max(1, -(-size_of(table) // _ROW_BYTES))
    step = max(1, -(-table.num_rows // parts))
    batches = table.cast(wanted).combine_chunks().to_batches(max_chunksize=step)
    rows = [(bytearray(batch_to_bytes(batch)),) for batch in batches]
    return map_in_arrow(spark.createDataFrame(rows, "content binary"), _unpack, schema)


def table_of_frame(frame: DataFrame) -> pa.Table:
    """``frame.toArrow()``, which Spark has from 4.0 on."""
    if spark_version() >= (4, 0):
        return frame.toArrow()
    rows = map_in_arrow(frame, _pack, "content binary").collect()
    batches = [batch for row in rows for batch in _unpacked(row.content)]
    wanted = arrow_schema_of(frame.schema)
    if not batches:
        return wanted.empty_table()
    return pa.Table.from_batches(batches).cast(wanted)  # tasks know no column without nulls


def _unpacked(content: bytes | bytearray) -> Iterator[pa.RecordBatch]:
    yield from pa.ipc.open_stream(pa.py_buffer(content))


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pydict(
            {"content": pa.array([batch_to_bytes(batch)], pa.binary())}
        )


def _unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for content in batch.column(0).to_pylist():
            yield from _unpacked(content)
