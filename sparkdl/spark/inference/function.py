"""A forward pass as a function of Spark's: in SQL, and beneath ``predict``.

The function takes Arrow arrays, or pandas' series where Spark (before 4.1) knows no such functions.
Only the columns that the model reads travel to Python, and only predictions come back; all other
columns stay where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow as pa
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.config import UseGpu
from sparkdl.data import DataSpec
from sparkdl.data.decode import is_vector
from sparkdl.errors import DataError
from sparkdl.launch.task import RankContext, Task
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.spark.executor.stage import input_of, run_task
from sparkdl.spark.forms.matching import Decoder, InputColumns, make_spec
from sparkdl.spark.forms.sequences import Pad, few_lengths, mask_inputs
from sparkdl.spark.forms.wire import wire_names
from sparkdl.spark.inference.forward import (
    ForwardPass,
    ForwardTask,
    HandleInvalid,
    PredictorTask,
    warn_of_shared_gpus,
)
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.runs.launcher import ship
from sparkdl.spark.session.interpreter import context_of, this_interpreter
from sparkdl.spark.session.versions import has_arrow_functions, spark_type_of

if TYPE_CHECKING:
    import pandas as pd

    Series: TypeAlias = pd.Series | pd.DataFrame
    """A column as pandas has it; one of structs is a DataFrame."""


@dataclass(frozen=True)
class UdfTask(ForwardTask):
    """Predictions for Arrow batches of arguments; see :class:`sparkdl.launch.task.Task`.

    Their types are known when the first rows come: a function has no schema.

    Args:
        archive: The model.
        output: What to return.
        batch_size: Rows per forward pass.
        use_gpu: See :class:`sparkdl.SparkModel`.
        handle_invalid: What becomes of rows that no model can take; never ``'skip'``.
        decoder: See :class:`sparkdl.SparkModel`.
        pad: See there.
    """

    archive: PredictorArchive
    output: OutputColumn
    batch_size: int
    use_gpu: UseGpu
    handle_invalid: HandleInvalid = "error"
    decoder: Decoder | Mapping[str, Decoder] | None = None
    pad: Pad | None = None

    @property
    def result(self) -> T.DataType:
        """The type of the function's result."""
        return self.output.field(self.archive).dataType

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One column: a prediction for each row."""
        first = next(batches, None)
        if first is None:
            return
        task = PredictorTask(self.archive, self._spec(first.schema), self.batch_size, self.use_gpu)
        with ForwardPass(
            task.spec, self.batch_size, [self.output], self.archive, self.handle_invalid,
            lambda: task.predictor(rank.resources),
        ) as forward:  # fmt: skip
            for predicted in forward.over(chain([first], batches)):
                yield pa.RecordBatch.from_arrays(predicted.columns, names=["prediction"])

    def _spec(self, schema: pa.Schema) -> DataSpec:
        """How to read the arguments."""
        fields = [T.StructField(f.name, _spark_type(f.type)) for f in schema]
        signature = self.archive.signature
        masks = mask_inputs(self.pad, None, signature.inputs)  # are made of other inputs
        features = _features(schema.names, [n for n in signature.inputs if n not in masks])
        spec = make_spec(
            T.StructType(fields), signature, features, None, decoder=self.decoder, pad=self.pad
        )
        return few_lengths(spec) if self.archive.archive.backend == "jax" else spec


def _features(names: list[str], inputs: list[str]) -> InputColumns:
    """Which argument is which input: one for each, or all for the only one."""
    if len(inputs) == 1:
        return names if len(names) > 1 else names[0]
    if len(names) != len(inputs):
        raise DataError(
            "a SQL function was called with the wrong number of arguments",
            expected=f"{len(inputs)} columns, for {inputs}",
            received=f"{len(names)}",
        )
    return dict(zip(inputs, names, strict=True))


def _spark_type(kind: pa.DataType) -> T.DataType:
    spark: T.DataType = VectorUDT() if is_vector(kind) else spark_type_of(kind)
    return spark


SETTING = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
"""Spark's setting for it, true by default."""


def as_rows(frame: Any) -> Any:
    """The frame, of which a function on Arrow arrays gets rows where it has user types.

    Spark cannot know that the filter lets every row pass, so it stays in the plan, between the scan
    and the function. Its cost is a comparison of an integer per row.
    """
    if not any(has_user_type(field.dataType) for field in frame.schema):
        return frame
    return frame.filter(F.spark_partition_id() >= 0)


def has_user_type(kind: T.DataType) -> bool:
    """Whether a column of this type holds values of a user type."""
    if isinstance(kind, T.ArrayType):
        return has_user_type(kind.elementType)
    if isinstance(kind, T.MapType):
        return has_user_type(kind.keyType) or has_user_type(kind.valueType)
    if isinstance(kind, T.StructType):
        return any(has_user_type(field.dataType) for field in kind)
    return isinstance(kind, T.UserDefinedType)


def give_rows(session: Any) -> None:
    """Makes Spark hand rows to all functions on Arrow arrays of a session.

    A function of SQL does not know the table that it is called on. A value that the user has set is
    left as it is.
    """
    if session.conf.isModifiable(SETTING) and session.conf.get(SETTING, None) is None:
        session.conf.set(SETTING, "false")


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
        from sparkdl.spark.inference.function import run_arguments

        yield from run_arguments(arguments, content_of(shipped))

    def run_pandas(arguments: Iterator[Any]) -> Iterator[Any]:
        from sparkdl.spark.executor.stage import content_of

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
    """The work of the function on the executor.

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


def run_series(
    arguments: Iterable[Series | tuple[Series, ...]], content: bytes | bytearray
) -> Iterator[pd.Series]:
    """The work of the function on the executor, for Spark before 4.1.

    pandas has no null among numbers but NaN, so that NaN counts as null here.

    Args:
        arguments: The columns of a batch of rows: one, or one for each argument.
        content: The pickled :class:`ColumnTask`.
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

    >>> import pandas as pd
    >>> to_arrow(pd.Series([[1.0, 2.0], None])).to_pylist()
    [[1.0, 2.0], None]
    """
    import pandas as pd

    if isinstance(column, pd.DataFrame):
        fields = [to_arrow(column[name]) for name in column.columns]
        null = fields[0].is_null() if fields else None
        return pa.StructArray.from_arrays(fields, names=list(column.columns), mask=null)
    made = pa.array(column, from_pandas=True)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def to_series(column: pa.Array) -> pd.Series:
    """A column as pandas has it; lists are lists of Python's."""
    import pandas as pd

    if pa.types.is_nested(column.type):
        return pd.Series(column.to_pylist(), dtype=object)
    if column.null_count:  # as an object, so that whole numbers stay such beside null
        return pd.Series(column.to_pylist(), dtype=object)
    return column.to_pandas()
