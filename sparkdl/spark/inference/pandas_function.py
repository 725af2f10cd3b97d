"""A forward pass as a function on pandas' series: for Spark before 4.1.

pandas has no null among numbers but NaN, so that NaN counts as null here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import pandas as pd
import pyarrow as pa

from sparkdl.spark.inference.arrow_function import run_arguments

Series: TypeAlias = pd.Series | pd.DataFrame
"""A column as pandas has it; one of structs is a DataFrame."""


def run_series(
    arguments: Iterable[Series | tuple[Series, ...]], content: bytes | bytearray
) -> Iterator[pd.Series]:
    """What the function does on the executor.

    Args:
        arguments: Of a batch of rows: one column, or one for each argument.
        content: The pickled :class:`~sparkdl.spark.inference.arrow_function.ColumnTask`.
    """

    for predicted in run_arguments(_typed(arguments), content):
        yield to_series(predicted)


def _typed(arguments: Iterable[Series | tuple[Series, ...]]) -> Iterator[tuple[pa.Array, ...]]:
    """Batches whose columns have a type, also where pandas has nothing but null.

    Such a batch waits for the first one that tells the types. Where none does, numbers are assumed.
    """
    kinds: list[pa.DataType] = []
    waiting: list[tuple[pa.Array, ...]] = []
    for given in arguments:
        columns = tuple(map(to_arrow, given if isinstance(given, tuple) else (given,)))
        kinds = kinds or [pa.null()] * len(columns)
        kinds = [c.type if pa.types.is_null(k) else k for c, k in zip(columns, kinds, strict=True)]
        waiting.append(columns)
        if not any(map(pa.types.is_null, kinds)):
            yield from (_as_kinds(one, kinds) for one in waiting)
            waiting.clear()
    numbers = pa.list_(pa.float32()) if len(kinds) == 1 else pa.float32()
    kinds = [numbers if pa.types.is_null(kind) else kind for kind in kinds]
    yield from (_as_kinds(one, kinds) for one in waiting)


def _as_kinds(columns: tuple[pa.Array, ...], kinds: list[pa.DataType]) -> tuple[pa.Array, ...]:
    return tuple(
        pa.nulls(len(column), kind) if pa.types.is_null(column.type) else column
        for column, kind in zip(columns, kinds, strict=True)
    )


def to_arrow(column: Series) -> pa.Array:
    """A column as Arrow has it; a struct without its first field is null.

    >>> to_arrow(pd.Series([[1.0, 2.0], None])).to_pylist()
    [[1.0, 2.0], None]
    """
    if isinstance(column, pd.DataFrame):
        fields = [to_arrow(column[name]) for name in column.columns]
        null = fields[0].is_null() if fields else None
        return pa.StructArray.from_arrays(fields, names=list(column.columns), mask=null)
    made = pa.array(column, from_pandas=True)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def to_series(column: pa.Array) -> pd.Series:
    """A column as pandas has it; lists are lists of Python's."""
    if pa.types.is_nested(column.type):
        return pd.Series(column.to_pylist(), dtype=object)
    if column.null_count:  # as an object, so that whole numbers stay such beside null
        return pd.Series(column.to_pylist(), dtype=object)
    return column.to_pandas()
