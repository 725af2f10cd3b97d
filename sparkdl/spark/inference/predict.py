"""predict for a DataFrame: one narrow pass, a batch at a time, when the rows are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.config import UseGpu
from sparkdl.errors import DataError
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.spark.columns.matching import make_spec
from sparkdl.spark.columns.sources import Columns
from sparkdl.spark.columns.wire import wire_names
from sparkdl.spark.driver.launcher import ship
from sparkdl.spark.executor.stage import stage_function
from sparkdl.spark.inference.arrow_function import column_function
from sparkdl.spark.inference.column_batches import as_rows
from sparkdl.spark.inference.forward import HandleInvalid
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict_task import AppendTask, PredictTask
from sparkdl.spark.inference.shared_gpus import warn_of_shared_gpus
from sparkdl.spark.session.interpreter import context_of, this_interpreter
from sparkdl.spark.session.running import require_running
from sparkdl.spark.session.versions import has_arrow_functions

_PREDICTIONS = "predictions"
"""The column of structs that the model's function returns."""


def predict_columns(
    frame: Any,
    archive: PredictorArchive,
    inputs: Columns,
    outputs: Sequence[OutputColumn],
    *,
    batch_size: int = 32,
    use_gpu: UseGpu = "auto",
    handle_invalid: HandleInvalid = "error",
) -> Any:
    """The frame with columns of predictions, all made in one pass over the rows.

    Rows keep their order and all their columns, and nothing runs yet. The frame may be a stream.

    Args:
        frame: A DataFrame.
        archive: The model.
        inputs: Which columns the model reads (``features``, ``decoder``).
        outputs: The columns to append, in this order.
        batch_size: Rows per forward pass.
        use_gpu: See :class:`sparkdl.SparkModel`.
        handle_invalid: See :func:`sparkdl.predict`.

    Raises:
        DataError: The columns do not fit, or one of ``outputs`` exists already.
    """
    require_running(frame.sparkSession)
    schema = frame.schema
    spec = make_spec(
        schema, archive.signature, inputs.features, None, None, inputs.decoder, pad=inputs.pad
    )
    _require_new([column.name for column in outputs], frame.columns)
    names = [*frame.columns, *(column.name for column in outputs)]
    # Spark takes no dot nor backtick in some places, nor one name twice.
    wire = frame.toDF(*wire_names(len(frame.columns)))
    task = PredictTask(archive, spec, batch_size, use_gpu, tuple(outputs), handle_invalid)
    predicted = _selected(wire, schema, task) if has_arrow_functions() else (
        _appended(wire, schema, task)
    )  # fmt: skip
    return predicted.toDF(*names)


def _selected(frame: Any, schema: T.StructType, task: PredictTask) -> Any:
    """The columns that the model reads travel to Python, and all others stay in the JVM."""
    function = column_function(task, frame.sparkSession, "sparkdl_predict", once=True)
    read = [frame.columns[schema.names.index(name)] for name in task.spec.columns]
    predicted = as_rows(frame).select("*", function(*map(F.col, read)).alias(_PREDICTIONS))
    if task.handle_invalid == "skip":
        predicted = predicted.filter(F.col(_PREDICTIONS).isNotNull())
    columns = [F.col(f"{_PREDICTIONS}.{name}") for name in task.result.names]
    return predicted.select(*frame.columns, *columns)


def _appended(frame: Any, schema: T.StructType, task: PredictTask) -> Any:
    """All columns travel to Python and back: for Spark before 4.1."""
    positions = tuple(map(schema.names.index, task.spec.columns))
    given = {field.name: getattr(task, field.name) for field in fields(task)}
    appending = AppendTask(**given, kept=len(schema), positions=positions)
    context = context_of(frame.sparkSession)
    warn_of_shared_gpus(frame.sparkSession, task.use_gpu)
    every = [*schema.fields, *task.result.fields]
    returned = [
        T.StructField(name, field.dataType, field.nullable, field.metadata)
        for name, field in zip(wire_names(len(every)), every, strict=True)
    ]
    function = stage_function(ship(appending, context, frame.sparkSession), 0)
    with this_interpreter(context):
        return frame.mapInArrow(function, T.StructType(returned))


def _require_new(names: Sequence[str], taken: Sequence[str]) -> None:
    """Refuses a column that the data have, or that stands twice among the new ones."""
    seen = {name.lower() for name in taken}
    for name in names:
        if name.lower() in seen:
            raise DataError(
                f"the data already have a column {name!r}",
                expected="a new name for each column of predictions",
                received=str([*taken, *names]),
                hint="predict(..., output_column='another name')",
            )
        seen.add(name.lower())
