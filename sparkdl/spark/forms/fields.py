"""Fields of a schema: finding one by its name, what it holds, and what it cannot be used for."""

from __future__ import annotations

import difflib
import math

import numpy as np
from pyspark.sql import Column
from pyspark.sql import types as T

from sparkdl.errors import DataError
from sparkdl.learner.signature import Shape
from sparkdl.settings.values import shown


def expression_error(column: Column, argument: str) -> DataError:
    """The error for an expression where the name of a column belongs."""
    return DataError(
        f"{argument} must name columns", expected="a name, or several",
        received=f"an expression of Spark, {shown(column)}",
        hint=f"{argument}='name'; df.withColumn('name', expression) gives an expression a name",
    )  # fmt: skip


def require_booleans(schema: T.StructType, name: str, argument: str, expected: str) -> None:
    """Refuses what is no column of booleans; ``expected`` says what it is for."""
    field = next((f for f in schema.fields if f.name == name), None)
    if field is None or not isinstance(field.dataType, T.BooleanType):
        raise DataError(
            f"{argument} names no column of booleans: {name!r}",
            expected=f"{expected}, true in the rows to validate on",
            received="no such column among " + ", ".join(map(repr, schema.names))
            if field is None
            else f"a column of type {field.dataType.simpleString()}",
            hint="F.col(...).cast('boolean')",
        )


def field_of(schema: T.StructType, name: str, argument: str) -> T.StructField:
    """The column of that name, if there is exactly one."""
    if isinstance(name, Column):
        raise expression_error(name, argument)
    if not isinstance(name, str):
        raise DataError(
            f"{argument} must name columns", expected="str", received=f"{type(name).__name__}",
            hint=f"the column is called {str(name)!r} here" if str(name) in schema.names else "",
        )  # fmt: skip
    if name not in schema.names:
        close = difflib.get_close_matches(name, schema.names, n=1)
        outer = name.partition(".")[0]
        if outer in schema.names and isinstance(schema[outer].dataType, T.StructType):
            raise DataError(
                f"column {name!r} ({argument}) is a field of a column",
                expected="one of " + ", ".join(repr(n) for n in schema.names), received=repr(name),
                hint=f"df.select('*', '{outer}.*') makes columns of the fields of {outer!r}",
            )  # fmt: skip
        raise DataError(
            f"column {name!r} ({argument}) is not in the data",
            expected="one of " + ", ".join(repr(n) for n in schema.names), received=repr(name),
            hint=f"did you mean {close[0]!r}?" if close else f"pass {argument}='your column'",
        )  # fmt: skip
    count = schema.names.count(name)
    if count > 1:
        raise DataError(
            f"column {name!r} ({argument}) is not the only one of its name",
            expected="one column of that name", received=f"{count} columns",
            hint="rename or drop the others, e.g. after a join",
        )  # fmt: skip
    return schema[name]


def check_vector_size(field: T.StructField, shape: Shape | None) -> None:
    """Compares the size in the metadata of a column of vectors, if it is there, with the model."""
    size = (field.metadata or {}).get("ml_attr", {}).get("num_attrs")
    if size is None or shape is None or any(d is None for d in shape):
        return
    if math.prod(d or 0 for d in shape) != size:
        raise DataError(
            f"column {field.name!r} does not fit the model",
            expected=f"{math.prod(d or 0 for d in shape)} values per row (shape {shape})",
            received=f"a vector of {size}",
        )


def element_of(kind: T.ArrayType) -> tuple[int, T.DataType]:
    """How deep an array is nested, and what its innermost elements are."""
    depth, element = 1, kind.elementType
    while isinstance(element, T.ArrayType):
        depth, element = depth + 1, element.elementType
    return depth, element


def is_number(kind: T.DataType) -> bool:
    """Whether a column of this type holds single numbers."""
    return isinstance(kind, (T.NumericType, T.BooleanType))


_DTYPES: dict[type[T.DataType], str] = {
    T.BooleanType: "bool", T.ByteType: "int8", T.ShortType: "int16", T.IntegerType: "int32",
    T.LongType: "int64", T.FloatType: "float32",
}  # fmt: skip


def dtype_of(*kinds: T.DataType) -> str:
    """The NumPy dtype of numbers of these types of Spark, which may be inside arrays."""
    found = []
    for kind in kinds:
        one = element_of(kind)[1] if isinstance(kind, T.ArrayType) else kind
        whole = isinstance(one, T.DecimalType) and one.scale == 0
        found.append("int64" if whole else _DTYPES.get(type(one), "float64"))
    return np.result_type(*found).name


_OF_TEXT = {
    "features": "turn text into numbers first, with pyspark.ml.feature.StringIndexer, or in the "
    "model: keras.Input((1,), dtype='string') and StringLookup or TextVectorization",
    "label": "pyspark.ml.feature.StringIndexer turns the texts into class numbers",
    "sample_weight": "F.col(...).cast('float') makes numbers of texts that are some",
}
"""What to do about a column of text, by what it was named for."""


def wrong_type(field: T.StructField, argument: str, expected: str, hint: str = "") -> DataError:
    """The error for a column of a type that an argument does not take."""
    if not hint and isinstance(field.dataType, T.StringType):
        hint = _OF_TEXT.get(argument, "")
    if not hint and isinstance(field.dataType, T.StructType):
        hint = f"df.select('*', '{field.name}.*') makes columns of its fields"
    element = element_of(field.dataType)[1] if isinstance(field.dataType, T.ArrayType) else None
    if isinstance(element or field.dataType, (T.DateType, T.TimestampType, T.TimestampNTZType)):
        hint = (
            "make numbers of times: F.unix_timestamp('t') gives seconds; F.hour('t'), "
            "F.dayofweek('t'), F.month('t') give what repeats"
        )
    return DataError(
        f"column {field.name!r} cannot be used as {argument}", expected=expected,
        received=f"a column of type {field.dataType.simpleString()}", hint=hint,
    )  # fmt: skip
