"""How columns travel from Spark to the task: under plain names, with errors beside the rows.

PySpark's ``mapInArrow`` takes no frame with a dot or a backtick in a column's name, nor one name
twice. So the driver renames the columns to ``c0, c1, ...`` (:func:`wire_names`, :func:`selection`),
and the executor gives them their own names back (:func:`named_batches`), for error messages.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.data import DataSpec
from sparkdl.data.decode import VECTOR_FIELDS
from sparkdl.errors import DataError
from sparkdl.spark.session.frames import column_named, is_vector_column

if TYPE_CHECKING:
    from pyspark.sql import types as T

ONES = "__sparkdl_ones"
"""A column that Spark makes, 1 in every row: the weight of outputs that are not weighted."""
GROUP = "group of "
"""Stands before the name of a column of which Spark makes numbers, equal where the values are."""
PROBLEM = "__sparkdl_problem"
"""A text column: the error that a :class:`~sparkdl.spark.forms.rdds.PairEncoder` found."""


def wire_names(count: int) -> list[str]:
    """Column names that every part of Spark takes: ``c0, c1, ...``."""
    return [f"c{i}" for i in range(count)]


def selection(schema: T.StructType, spec: DataSpec, names: list[str]) -> list[Any]:
    """On the driver: the Spark columns to select for ``spec``, ML vectors as arrays of floats.

    Args:
        names: What to call each of ``spec.columns``.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    columns = []
    for name, alias in zip(spec.columns, names, strict=True):
        if name == ONES:
            columns.append(F.lit(1.0).cast("float").alias(alias))
            continue
        if name.startswith(GROUP):
            column = column_named(name.removeprefix(GROUP))
            columns.append(F.when(column.isNotNull(), F.xxhash64(column)).alias(alias))
            continue
        column = column_named(name)
        if is_vector_column(schema[name].dataType):
            column = vector_to_array(column, "float32")
        columns.append(column.alias(alias))
    return columns


def holds_vectors(kind: T.DataType) -> bool:
    """Whether these are vectors, also in files that keep the fields and no type, as ORC does."""
    from pyspark.sql import types as T

    if isinstance(kind, T.StructType):
        return set(kind.names) == VECTOR_FIELDS
    return is_vector_column(kind)


def named_batches(batches: Iterable[pa.RecordBatch], spec: DataSpec) -> Generator[pa.RecordBatch]:
    """On the executor: batches with the names of ``spec.columns``.

    Raises:
        DataError: An element of an RDD that is no example; found before, raised here.
    """
    columns = [name for name in spec.columns if name != spec.role_column]
    names = dict(zip(wire_names(len(columns)), columns, strict=True))
    for batch in batches:
        given = batch.schema.names
        if PROBLEM in given:
            problems = batch.column(given.index(PROBLEM)).drop_null()
            if len(problems):
                what, expected, received, hint = json.loads(problems[0].as_py())
                raise DataError(what, expected=expected, received=received, hint=hint)
        kept = [i for i, name in enumerate(given) if name != PROBLEM]
        yield pa.RecordBatch.from_arrays(
            [batch.column(i) for i in kept], names=[names.get(given[i], given[i]) for i in kept]
        )


def pack_problem(error: DataError) -> str:
    """On the executor: an error as text for the column :data:`PROBLEM`."""
    return json.dumps([error.what, error.expected, error.received, error.hint])


def no_type(name: str, received: str, value: bool = False) -> DataError:
    """The error for a column that Spark cannot have: for its type, or for a value of it."""
    what = "holds a value that Spark's type does not" if value else "has a type that Spark lacks"
    return DataError(
        f"column {name!r} {what}", expected="a type of Spark that holds all of the column's values",
        received=received, hint="write it as numbers: column.cast('double'), say",
    )  # fmt: skip
