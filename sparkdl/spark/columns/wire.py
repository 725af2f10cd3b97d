"""Columns on their way to the executors: under plain names, and with errors beside the rows.

PySpark's ``mapInArrow`` cannot take a frame with a dot or a backtick in a column's name, nor one
name twice. So columns travel as ``c0, c1, ...`` and get their own names back on the executor,
where error messages need them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from sparkdl.data import DataSpec
from sparkdl.errors import DataError

PROBLEM = "__sparkdl_problem"
"""A text column: the error that an encoder upstream found instead of a row."""


def wire_names(count: int) -> list[str]:
    """Names that every part of Spark takes."""
    return [f"c{i}" for i in range(count)]


def named_batches(batches: Iterable[pa.RecordBatch], spec: DataSpec) -> Iterator[pa.RecordBatch]:
    """On the executor: batches with the names of ``spec.columns``.

    Raises:
        DataError: What the encoder of an RDD found.
    """
    columns = [name for name in spec.columns if name != spec.role_column]
    names = dict(zip(wire_names(len(columns)), columns, strict=True))
    for batch in batches:
        given = batch.schema.names
        if PROBLEM in given:
            _raise_problem(batch.column(given.index(PROBLEM)))
        kept = [i for i, name in enumerate(given) if name != PROBLEM]
        yield pa.RecordBatch.from_arrays(
            [batch.column(i) for i in kept], names=[names.get(given[i], given[i]) for i in kept]
        )


def pack_problem(error: DataError) -> str:
    """An error as text for the column :data:`PROBLEM`."""
    return json.dumps([error.what, error.expected, error.received, error.hint])


def _raise_problem(column: Any) -> None:
    if column.null_count < len(column):
        what, expected, received, hint = json.loads(column.drop_null()[0].as_py())
        raise DataError(what, expected=expected, received=received, hint=hint)
