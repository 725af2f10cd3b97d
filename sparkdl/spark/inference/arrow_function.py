"""A forward pass as a function of Spark's: in SQL, and beneath ``predict``.

The function takes Arrow arrays, or pandas' series where Spark (before 4.1) knows no such functions.
Only the columns that the model reads travel to Python, and only predictions come back; all other
columns stay where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.config import UseGpu
from sparkdl.launch.task import Task
from sparkdl.spark.columns.wire import wire_names
from sparkdl.spark.driver.launcher import ship
from sparkdl.spark.executor.stage import input_of, run_task
from sparkdl.spark.inference.shared_gpus import warn_of_shared_gpus
from sparkdl.spark.session.interpreter import context_of, this_interpreter
from sparkdl.spark.session.versions import has_arrow_functions


class ColumnTask(Task, Protocol):
    """A task that yields one column: a value for each row that comes in."""

    @property
    def use_gpu(self) -> UseGpu:
        """See :class:`sparkdl.SparkModel`."""

    @property
    def result(self) -> T.DataType:
        """Type of the values."""


def column_function(
    task: ColumnTask, session: Any, name: str, *, once: bool = False
) -> Callable[..., Any]:
    """A function of columns.

    Args:
        task: What it does. It gets the arguments as columns ``c0, c1, ...``.
        session: The Spark session; None if there is none yet.
        name: Of the function, in plans of Spark.
        once: Spark may not run it twice for a row, nor for rows that a ``limit`` leaves out, in
            order to filter earlier.
    """
    context = None if session is None else context_of(session)
    warn_of_shared_gpus(session, task.use_gpu)
    shipped = ship(task, context, session)

    def run(arguments: Iterator[Any]) -> Iterator[Any]:
        from sparkdl.spark.executor.stage import content_of
        from sparkdl.spark.inference.arrow_function import run_arguments

        yield from run_arguments(arguments, content_of(shipped))

    def run_pandas(arguments: Iterator[Any]) -> Iterator[Any]:
        from sparkdl.spark.executor.stage import content_of
        from sparkdl.spark.inference.pandas_function import run_series

        yield from run_series(arguments, content_of(shipped))

    run.__name__ = run_pandas.__name__ = name
    with warnings.catch_warnings():  # type hints cannot say that any number of arguments will do
        warnings.filterwarnings("ignore", message="(?i).*it is preferred to specify type hints")
        made: Any = (
            F.arrow_udf(run, task.result, F.ArrowUDFType.SCALAR_ITER)
            if has_arrow_functions()
            else F.pandas_udf(run_pandas, task.result, F.PandasUDFType.SCALAR_ITER)
        )
    if once:
        made = made.asNondeterministic()
    if context is not None:
        with this_interpreter(context):  # Spark takes the interpreter at the first use
            made(F.lit(None))
    function: Callable[..., Any] = made
    return function


def run_arguments(
    arguments: Iterable[pa.Array | tuple[pa.Array, ...]], content: bytes | bytearray
) -> Iterator[pa.Array]:
    """What the function does on the executor.

    Args:
        arguments: Of a batch of rows: one Arrow array, or one for each argument.
        content: The pickled :class:`ColumnTask`.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        for given in arguments:
            arrays = given if isinstance(given, tuple) else (given,)
            yield pa.RecordBatch.from_arrays(list(arrays), names=wire_names(len(arrays)))

    for batch in run_task(input_of(batches()), content):
        yield batch.column(0)
