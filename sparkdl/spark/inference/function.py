"""A forward pass as a function of Spark's: in SQL, and beneath ``predict``.

The function takes Arrow arrays, or pandas' series where Spark (before 4.1) knows no such functions.
Only the columns that the model reads travel to Python, and only predictions come back; all other
columns stay where they are.
"""

from __future__ import annotations

import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from sparkdl.launch.devices import start_framework
from sparkdl.launch.task import RankContext, Task
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.preprocessing import LayerEncoder
from sparkdl.learner.signature import TensorSpec
from sparkdl.spark.executor.stage import Shipped, input_of, run_task, stage_function
from sparkdl.spark.forms.matching import IMAGE_FIELDS, Decoder, InputColumns, make_spec
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
from sparkdl.spark.session.running import context_of, this_interpreter
from sparkdl.spark.session.versions import has_arrow_functions, map_in_arrow, spark_type_of

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    Series: TypeAlias = pd.Series | pd.DataFrame
    """A column as pandas has it; one of structs is a DataFrame."""


@dataclass(frozen=True)
class UdfTask(ForwardTask):
    """Predictions for Arrow batches of arguments; see :class:`sparkdl.launch.task.Task`.

    Their types are known when the first rows come: a function has no schema.

    Args:
        handle_invalid: What happens to rows that no model can take; never ``'skip'``.
    """

    archive: PredictorArchive
    output: OutputColumn
    batch_size: int
    use_gpu: UseGpu
    handle_invalid: HandleInvalid = "error"
    decoder: Mapping[str, Decoder] = field(default_factory=dict)
    pad: Pad | None = None

    @property
    def result(self) -> T.DataType:
        return self.output.field(self.archive).dataType

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One column: a prediction for each row."""
        first = next(batches, None)
        if first is None:
            return
        inputs = self.inputs
        by_name = inputs.have_names(first.schema)
        named = (inputs.named(batch) for batch in chain([first], batches))
        first = next(named)
        if any(isinstance(made, LayerEncoder) for made in self.decoder.values()):
            start_framework(self.devices.place(rank.resources))
        spec = self._spec(first.schema, by_name)
        task = PredictorTask(self.archive, spec, self.batch_size, self.use_gpu)
        with ForwardPass(
            task.spec, self.batch_size, [self.output], self.archive, self.handle_invalid,
            lambda: task.predictor(rank.resources),
        ) as forward:  # fmt: skip
            for predicted in forward.over(chain([first], named)):
                yield pa.RecordBatch.from_arrays(predicted.columns, names=["prediction"])

    @property
    def inputs(self) -> FunctionInputs:
        """The inputs that take a column; masks are made of other inputs."""
        signature = self.archive.signature
        masks, before = mask_inputs(self.pad, None, signature.inputs), signature.preprocessing
        specs = {n: s for n, s in signature.inputs.items() if n not in masks}
        for name, made in self.decoder.items():  # which takes other values than the model
            if name in specs:
                text = isinstance(made, LayerEncoder)
                specs[name] = TensorSpec(name, None, "string" if text else "float32")
        if before is not None and before.columns:
            specs = {n: TensorSpec(n, (), dtype) for n, dtype in before.columns.items()}
        free = before is not None and not before.columns and not self.decoder
        return FunctionInputs(specs, free)

    def _spec(self, schema: pa.Schema, by_name: bool) -> DataSpec:
        kinds = [
            T.StructField(f.name, VectorUDT() if is_vector(f.type) else spark_type_of(f.type))
            for f in schema
        ]
        names, inputs = schema.names, self.inputs
        features: InputColumns = dict(zip(names, names, strict=True))
        if not by_name:
            features = names if len(names) > 1 else names[0]
        for kind in kinds if by_name and not inputs.free else []:
            inputs.check(kind)
        spec = make_spec(
            T.StructType(kinds), self.archive.signature, features, None,
            decoder=self.decoder, pad=self.pad,
        )  # fmt: skip
        return few_lengths(spec) if self.archive.archive.backend == "jax" else spec


@dataclass(frozen=True)
class FunctionInputs:
    """Which argument of a SQL function is which input of its model.

    Args:
        specs: The inputs, in the order in which a call without names gives their columns.
        free: Whether a preprocessor takes what comes: one value, texts in an order, or a struct of
            parts that it knows by their names.
    """

    specs: Mapping[str, TensorSpec]
    free: bool = False

    def __str__(self) -> str:
        return ", ".join(
            f"{name!r}" + ("" if spec.shape is None else f" {spec.shape}")
            for name, spec in self.specs.items()
        )

    @property
    def hint(self) -> str:
        """How to say which column is which input."""
        named = ", ".join(f"'{name}', {name}" for name in self.specs)
        return f"columns without names are the inputs in this order: {self}; by name: " + (
            f"function(named_struct({named})) in SQL, function({', '.join(self.specs)}=column) or "
            "a struct of DataFrame columns"
        )

    def have_names(self, schema: pa.Schema) -> bool:
        """Whether a row of such columns is a dict, by the names that :meth:`named` gives."""
        if self.free and len(schema) == 1 and pa.types.is_struct(schema.types[0]):
            return not {field.name for field in schema.types[0]} >= IMAGE_FIELDS
        return len(self.specs) > 1

    def named(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch whose columns are called as the inputs that they are for.

        A struct with a field for each input is taken apart, by the names of its fields. Several
        columns for one input keep their names.

        Raises:
            DataError: Another number of columns, or a struct of other fields.
        """
        names, columns = list(self.specs), batch.columns
        if len(columns) == 1:
            (kind,) = batch.schema.types
            fields = [f.name for f in kind] if pa.types.is_struct(kind) else []
            if self.have_names(batch.schema) and self.free:
                names = fields
            if fields and sorted(fields) == sorted(names):
                parts = dict(zip(fields, columns[0].flatten(), strict=True))
                columns = [parts[name] for name in names]
            elif fields and len(names) > 1:
                raise DataError(
                    "a SQL function was called with a struct of other fields than the model's "
                    "inputs",
                    expected=f"a field for each of the inputs {list(self.specs)}",
                    received=f"{fields}",
                    hint=self.hint,
                )
        if len(columns) != len(names):
            if len(names) == 1 and columns:
                return batch
            raise DataError(
                "a SQL function was called with the wrong number of arguments",
                expected=f"{len(names)} columns, for {self}, in this order",
                received=f"{len(columns)}", hint=self.hint,
            )  # fmt: skip
        return pa.RecordBatch.from_arrays(columns, names=names)

    def check(self, field: T.StructField) -> None:
        """Refuses a column of a type that the input of its name cannot have.

        Raises:
            DataError: A number where the input wants arrays, or the reverse.
        """
        wanted, pattern = self.wanted(field.name)
        kind = field.dataType.simpleString()
        if not re.search(pattern, kind):
            raise DataError(
                f"column {list(self.specs).index(field.name) + 1} of a SQL function cannot be "
                f"input {field.name!r}",
                expected=wanted,
                received=f"a column of type {kind}",
                hint=self.hint,
            )

    def wanted(self, name: str) -> tuple[str, str]:
        """The values that an input takes: in words, and as a pattern of Spark's types for them."""
        spec = self.specs[name]
        if spec.dtype == "string":
            return "text", "^(string|varchar|char|void)"
        if spec.shape is None:
            return "any column", ""
        if spec.shape == ():
            return "a number", _NUMBER
        arrays = "^(array|vector|struct|binary|void)"
        several = math.prod(d or 2 for d in spec.shape) > 1
        return f"values of shape {spec.shape}", arrays if several else f"{arrays}|{_NUMBER}"

    def columns(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The columns of one call, in the order of the inputs, checked while Spark plans the query.

        Spark makes an expression's types known to none but other expressions, and lets Python add
        no message of its own to the analysis. So the schema of a ``from_json``, which Spark reads
        then, is made of the columns' types: where one does not fit, it is no schema but the error.
        Spark leaves the whole of it out of the plan.

        Raises:
            DataError: Names that are not those of the inputs.
        """
        names = list(self.specs)
        if self.free and named and not arguments and sorted(named) != names:
            parts = {n: F.col(c) if isinstance(c, str) else c for n, c in named.items()}
            return [F.struct(*(column.alias(name) for name, column in parts.items()))]
        if named:
            if arguments or sorted(named) != sorted(names):
                raise DataError(
                    "a SQL function was called with other names than those of the model's inputs",
                    expected=f"a column for each of {names}",
                    received=f"{sorted(named)} and {len(arguments)} columns without a name",
                    hint=self.hint,
                )
            arguments = [named[name] for name in names]
        if len(arguments) != len(names) or len(names) == 1:
            return list(arguments)
        return [
            self._checked(name, F.col(c) if isinstance(c, str) else c)
            for name, c in zip(names, arguments, strict=True)
        ]

    def _checked(self, name: str, column: object) -> Any:
        kind = F.typeof(column)
        wanted, pattern = self.wanted(name)
        error = (
            f"sparkdl: this column cannot be input {name!r} of the model; expected: "
            f"{wanted}; inputs in order: {self}; received: "
        ).replace("`", "``")
        schema = F.when(kind.rlike(pattern), F.lit("fits int")).otherwise(
            F.concat(F.lit(f"fits `{error}"), kind, F.lit("`"))
        )
        # by its name, which Spark looks up with the columns: its function wants them known (3.5)
        read = F.call_function("from_json", F.lit(None).cast("string"), schema)
        return F.when(read.isNull(), column)


_NUMBER = "^(tinyint|smallint|int|bigint|float|double|decimal|boolean|void)"
"""The types of Spark that are one number."""


SETTING = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
"""Spark's setting for it, true by default."""


def as_rows(frame: DataFrame) -> Any:
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
    def use_gpu(self) -> UseGpu: ...
    @property
    def result(self) -> T.DataType: ...


def column_function(
    task: ColumnTask, session: object, name: str, *, once: bool = False
) -> Callable[..., Any]:
    """A function of columns.

    Args:
        task: What it does. It gets the arguments as columns ``c0, c1, ...``.
        session: The Spark session; None if there is none yet.
        name: Name of the function, in plans of Spark.
        once: Spark may not run it twice for a row, nor for rows that a ``limit`` leaves out, in
            order to filter earlier.
    """
    context = None if session is None else context_of(session)
    warn_of_shared_gpus(session, task.use_gpu)
    shipped = ship(task, context, session)

    def run(arguments: Iterator[Any]) -> Iterator[Any]:
        return run_arguments(arguments, shipped)

    def run_pandas(arguments: Iterator[Any]) -> Iterator[Any]:
        # pandas has no null among numbers but NaN, so that NaN counts as null here
        return map(to_series, run_arguments(_typed(arguments), shipped))

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


_RESULTS = "results"


def append_results(
    frame: Any, schema: T.StructType, task: ColumnTask, struct: T.StructType, read: Sequence[str],
    appending: Task, name: str, *, left_out: bool = False,
) -> Any:  # fmt: skip
    """The frame with what a task makes of each row in columns after the others; nothing runs yet.

    Args:
        frame: The rows, with columns under wire names.
        schema: Its schema, with the columns' own names.
        task: Makes a ``struct`` for each row, of the columns ``read``: only these travel to Python.
        appending: The same for Spark before 4.1, where all columns travel there and back.
        name: Name of the function, in plans of Spark.
        left_out: Rows for which the task makes null are left out.

    Raises:
        DataError: A column that cannot travel.
    """
    if has_arrow_functions():
        function = column_function(task, frame.sparkSession, name, once=True)
        columns = [frame.columns[schema.names.index(column)] for column in read]
        made = as_rows(frame).select("*", function(*map(F.col, columns)).alias(_RESULTS))
        made = made.filter(F.col(_RESULTS).isNotNull()) if left_out else made
        return made.select(*frame.columns, *(F.col(f"{_RESULTS}.{one}") for one in struct.names))
    for column in schema:
        if not _is_known_to_arrow(column.dataType):
            raise DataError(
                f"column {column.name!r} cannot pass predict or transform on this Spark",
                expected="Spark 4.1 or newer, or columns that Arrow knows",
                received=column.dataType.simpleString(),
                hint="cast it to a string, or give its fields names of their own",
            )
    warn_of_shared_gpus(frame.sparkSession, task.use_gpu)
    every = [*schema.fields, *struct.fields]
    returned = [
        T.StructField(name, field.dataType, field.nullable, field.metadata)
        for name, field in zip(wire_names(len(every)), every, strict=True)
    ]
    shipped = ship(appending, context_of(frame.sparkSession), frame.sparkSession)
    return map_in_arrow(frame, stage_function(shipped, 0), T.StructType(returned))


def _is_known_to_arrow(kind: T.DataType) -> bool:
    """Whether older Sparks give such a column to tasks."""
    if isinstance(kind, T.StructType):
        own = len(set(kind.names)) == len(kind)
        return own and all(_is_known_to_arrow(field.dataType) for field in kind)
    if isinstance(kind, T.MapType):
        return _is_known_to_arrow(kind.keyType) and _is_known_to_arrow(kind.valueType)
    if isinstance(kind, T.ArrayType):
        return _is_known_to_arrow(kind.elementType)
    return kind.typeName() not in ("interval", "yearmonthinterval")


def run_arguments(
    arguments: Iterable[pa.Array | tuple[pa.Array, ...]], shipped: Shipped
) -> Iterator[pa.Array]:
    """The work of the function on the executor.

    Args:
        arguments: Arguments of a batch of rows: one Arrow array, or one for each argument.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        for given in arguments:
            arrays = given if isinstance(given, tuple) else (given,)
            yield pa.RecordBatch.from_arrays(list(arrays), names=wire_names(len(arrays)))

    return map(operator.itemgetter(0), run_task(input_of(batches()), shipped))


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

    # as objects, so that whole numbers stay such beside null
    if pa.types.is_nested(column.type) or column.null_count:
        return pd.Series(column.to_pylist(), dtype=object)
    return column.to_pandas()
