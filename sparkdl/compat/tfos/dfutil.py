"""DataFrames and TFRecord files."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from sparkdl.data.tfrecord.blocks import block_of
from sparkdl.data.tfrecord.decoding import decode_block
from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.data.tfrecord.framing import read_frames
from sparkdl.data.tfrecord.inference import infer_schema as infer_arrow_schema
from sparkdl.spark.session.versions import arrow_schema_of, schema_of_ddl, spark_schema_of
from sparkdl.spark.tfrecord.functions import read_tfrecords, write_tfrecords

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

loadedDF: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""DataFrames that :func:`loadTFRecords` made, and where from."""


def isLoadedDF(df: object) -> bool:
    """Whether a DataFrame was made by :func:`loadTFRecords` and nothing was done to it since."""
    return df in loadedDF


def saveAsTFRecords(df: object, output_dir: str) -> None:
    """Writes a DataFrame as TFRecord files of Examples.

    Args:
        df: The rows.
        output_dir: A folder that holds no files.

    Raises:
        ResourceError: It holds some.
    """
    write_tfrecords(df, output_dir)


def loadTFRecords(sc: object, input_dir: str, binary_features: Sequence[str] = ()) -> Any:
    """TFRecord files of Examples as a DataFrame.

    Integers become ``bigint``, floats ``double``, bytes ``string``, or ``binary`` for those in
    ``binary_features``; several values an array.

    Args:
        sc: The SparkContext.
        input_dir: The folder.
        binary_features: Names of features with bytes that are no text.
    """
    from pyspark.sql import SparkSession

    read = read_tfrecords(SparkSession(sc), input_dir, binary_features=binary_features)
    df = read.to(_with_doubles(read.schema))
    loadedDF[df] = input_dir
    return df


def toTFExample(
    dtypes: Sequence[tuple[str, str]],
) -> Callable[[Iterable[Sequence[Any]]], list[tuple[bytearray, None]]]:
    """A function for ``rdd.mapPartitions`` that makes Examples of rows.

    Args:
        dtypes: Names and types of the columns, as ``df.dtypes``.

    Returns:
        From the rows of a partition to pairs of a serialized Example and None.
    """
    columns = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in dtypes)
    schema = arrow_schema_of(schema_of_ddl(columns))

    def encode(rows: Iterable[Sequence[Any]]) -> list[tuple[bytearray, None]]:
        found = [tuple(row) for row in rows]
        values = zip(*found, strict=True) if found else [()] * len(schema)
        arrays = [pa.array(column, of.type) for column, of in zip(values, schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        frames = read_frames(io.BytesIO(encode_batch(batch, "Example")))
        return [(bytearray(example), None) for example in frames]

    return encode


def fromTFExample(
    iter: Iterable[bytes | tuple[bytes, Any]], binary_features: Sequence[str] = ()
) -> list[Any]:
    """The Examples of a partition as rows; for ``rdd.mapPartitions``.

    Args:
        iter: Serialized Examples, or pairs whose first part is one, as Hadoop's files have them.
        binary_features: Names of features with bytes that are no text.

    Returns:
        Rows with the features of each Example, in alphabetical order: a value, or a list of values.
    """
    from pyspark.sql import Row

    rows = []
    for record in iter:
        example = bytes(record[0] if isinstance(record, tuple) else record)
        block = block_of([example])
        schema = infer_arrow_schema([block], binary_features=binary_features)
        row = decode_block(block, schema, "Example").to_pylist()[0] if len(schema) else {}
        rows.append(Row(**dict(sorted(row.items()))))
    return rows


def infer_schema(example: bytes | _Example, binary_features: Sequence[str] = ()) -> StructType:
    """The columns that one Example has, in alphabetical order.

    Args:
        example: A ``tf.train.Example``, or one that is serialized.
        binary_features: Names of features with bytes that are no text.
    """
    content = example if isinstance(example, bytes) else example.SerializeToString()
    found = infer_arrow_schema([block_of([content])], binary_features=binary_features)
    schema = pa.schema([found.field(name) for name in sorted(found.names)])
    return _with_doubles(spark_schema_of(schema))


class _Example(Protocol):
    """The interface of ``tf.train.Example``."""

    def SerializeToString(self) -> bytes: ...


def _with_doubles(schema: StructType) -> StructType:
    from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

    def widened(kind: DataType) -> DataType:
        if isinstance(kind, ArrayType):
            return ArrayType(widened(kind.elementType), kind.containsNull)
        return DoubleType() if isinstance(kind, FloatType) else kind

    return StructType([StructField(f.name, widened(f.dataType), f.nullable) for f in schema])
