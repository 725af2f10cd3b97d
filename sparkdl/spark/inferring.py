"""``inference``: a function of the user's own over the rows of a DataFrame, one result for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.feed import Columns, to_numpy
from sparkdl.errors import ConfigError, DataError
from sparkdl.process import payload
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_int
from sparkdl.spark.runs.feeding import fed_frame
from sparkdl.spark.runs.function_stage import dump_function
from sparkdl.spark.session.versions import arrow_type_of, map_in_arrow, whole_batches


@lists_its_arguments
def inference(
    fn: Callable[..., Iterator[Any]],
    data: object,
    schema: object,
    args: Sequence[Any] = (),
    *,
    batch_size: int = 1024,
    spark: object = None,
) -> Any:
    """The rows of a DataFrame with the results of a function in further columns.

    The function is called once for each partition, in an ordinary stage: ``fn(batches, *args)``
    takes an iterator of batches (dicts of NumPy arrays by column name) and yields the results of
    each, in order. So it loads its model once and keeps no partition in memory. Nothing runs before
    the result is asked for, and rows stay in their order.

    Args:
        fn: Yields for each batch an array, or a dict of arrays by column name if there are several
            columns; the first axis is the rows. It may take some batches before it yields. Pickled
            by value if it is not part of an installed package.
        data: A DataFrame, or a path of Parquet or TFRecord files.
        schema: The new columns, a StructType or a DDL text: ``'prediction array<float>'``.
        args: Further arguments of the function.
        batch_size: Rows of a batch, at most.
        spark: The session for paths; None: the active one.

    Returns:
        A DataFrame; vectors among its columns have become arrays.

    Raises:
        ConfigError: A wrong argument, a function that cannot be pickled, or a column that is there
            already.

    >>> def double(batches):
    ...     for batch in batches:
    ...         yield batch['id'] * 2
    >>> sparkdl.inference(double, spark.range(3), 'twice bigint').collect()  # doctest: +SKIP
    [Row(id=0, twice=0), Row(id=1, twice=2), Row(id=2, twice=4)]
    """
    from pyspark.sql import types as T

    batch_size = require_int("batch_size", batch_size, 1)
    content = dump_function(fn, args, {}, "the batches before args")
    frame, names = fed_frame(data, spark)
    added = frame.sparkSession.createDataFrame([], schema).schema
    there = sorted(set(names) & set(added.names))
    if there or not added.names:
        raise ConfigError(
            "the results cannot become columns of the data",
            expected="new names for one column or more",
            received=f"{', '.join(there)}, which are there" if there else "no column",
        )
    old = [T.StructField(n, f.dataType) for n, f in zip(names, frame.schema, strict=True)]
    new = [T.StructField(field.name, field.dataType) for field in added]
    stage = partial(
        infer_partition, content=content, names=names, added=added.json(), batch_size=batch_size
    )
    return map_in_arrow(frame, stage, T.StructType([*old, *new]))


def infer_partition(
    batches: Iterator[pa.RecordBatch],
    content: bytes,
    names: tuple[str, ...],
    added: str,
    batch_size: int,
) -> Iterator[pa.RecordBatch]:
    """A partition's batches with the results of the function; see :func:`inference`.

    Args:
        content: The pickled function and its arguments.
        names: Names of the partition's columns.
        added: The schema of the results, as JSON.
        batch_size: Rows that the function gets at a time.

    Raises:
        DataError: It yields another number of results than it got rows.
    """
    import json

    from pyspark.sql import types as T

    schema = T.StructType.fromJson(json.loads(added))
    fields = [pa.field(f.name, arrow_type_of(f.dataType)) for f in schema]
    function, args, kwargs = payload.load(content)
    pending: deque[pa.RecordBatch] = deque()

    def taken() -> Iterator[Columns]:
        for batch in whole_batches(batches):
            for start in range(0, batch.num_rows, batch_size):
                part = batch.slice(start, batch_size)
                pending.append(part)
                columns = zip(names, part.columns, strict=True)
                yield {name: to_numpy(column) for name, column in columns}

    for result in function(taken(), *args, **kwargs):
        if not pending:
            raise _wrong_count("no batch is left for them", "more results than batches")
        yield _joined(pending.popleft(), names, fields, result)
    if pending or next(iter(taken()), None) is not None:
        raise _wrong_count("a result for every batch", "the function's end before that of the rows")


def _joined(
    batch: pa.RecordBatch, names: tuple[str, ...], fields: list[pa.Field], result: Any
) -> pa.RecordBatch:
    columns = result if isinstance(result, Mapping) else {fields[0].name: result}
    if sorted(columns) != sorted(field.name for field in fields):
        raise _wrong_count(
            f"the columns {[field.name for field in fields]}", f"{sorted(map(str, columns))}"
        )
    arrays = []
    for field in fields:
        values = columns[field.name]
        if len(values) != batch.num_rows:
            raise _wrong_count(f"{batch.num_rows} of {field.name!r}", f"{len(values)}")
        if isinstance(values, np.ndarray):
            values = values.tolist() if values.ndim != 1 else values
        arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(
        [*batch.columns, *arrays], names=[*names, *(field.name for field in fields)]
    )


def _wrong_count(expected: str, received: str) -> DataError:
    return DataError(
        "the results of a function for inference do not fit its rows", expected=expected,
        received=received,
        hint="yield once for each batch, an array whose first axis is the batch's rows",
    )  # fmt: skip
