"""predict for a DataFrame: one narrow pass, a batch at a time, when the rows are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from sparkdl.config import UseGpu
from sparkdl.errors import DataError
from sparkdl.launch.task import RankContext
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.spark.columns.matching import make_spec
from sparkdl.spark.columns.sources import Columns
from sparkdl.spark.columns.wire import selection, wire_names
from sparkdl.spark.driver.cluster import is_connect, require_running
from sparkdl.spark.driver.interpreter import this_interpreter
from sparkdl.spark.driver.launcher import ship
from sparkdl.spark.executor.stage import stage_function
from sparkdl.spark.inference.forward import ForwardPass, HandleInvalid
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predictor_task import PredictorTask
from sparkdl.spark.inference.shared_gpus import warn_of_shared_gpus


@dataclass(frozen=True)
class PredictTask(PredictorTask):
    """Appends predictions to Arrow batches; see :class:`sparkdl.launch.task.Task`.

    Args:
        outputs: The columns to append.
        kept: Columns that come back as they are: the first so many.
        positions: Where each of ``spec.columns`` is among the columns sent.
        handle_invalid: What becomes of rows that no model can take.
    """

    outputs: tuple[OutputColumn, ...]
    kept: int
    positions: tuple[int, ...]
    handle_invalid: HandleInvalid = "error"

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows with their predictions; the next are read when these have been taken."""
        with ForwardPass(
            self.spec, self.batch_size, self.outputs, self.archive, self.handle_invalid,
            lambda: self.predictor(rank.resources),
        ) as forward:  # fmt: skip
            for batch in batches:
                columns = [batch.column(i) for i in self.positions]
                sent = pa.RecordBatch.from_arrays(columns, names=list(self.spec.columns))
                for predicted in forward.predict(sent):
                    rows = batch.slice(predicted.start, predicted.stop - predicted.start)
                    if predicted.valid is not None:
                        rows = rows.filter(pa.array(predicted.valid))
                    every = [*rows.columns[: self.kept], *predicted.columns]
                    yield pa.RecordBatch.from_arrays(every, names=wire_names(len(every)))


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
    fields = [*schema.fields, *(column.field(archive) for column in outputs)]
    # All columns travel under wire names, and get their own back on the driver. ML vectors travel
    # twice: as they are for the result, as arrays for the model.
    count = len(schema.fields)
    wire = wire_names(len(fields) + len(spec.columns))
    vectors = [n for n in spec.columns if isinstance(schema[n].dataType, T.UserDefinedType)]
    positions = {name: schema.names.index(name) for name in spec.columns}
    prepared = frame
    if vectors:
        copies = dict(zip(vectors, range(count, count + len(vectors)), strict=True))
        arrays = selection(schema, spec, [wire[{**positions, **copies}[n]] for n in positions])
        chosen = [a for a, n in zip(arrays, spec.columns, strict=True) if n in copies]
        prepared = frame.select("*", *chosen)
        positions |= copies
    prepared = prepared.toDF(*wire[: len(prepared.columns)])
    task = PredictTask(
        archive, spec, batch_size, use_gpu, tuple(outputs), count,
        tuple(positions[name] for name in spec.columns), handle_invalid,
    )  # fmt: skip
    spark = frame.sparkSession
    context = None if is_connect(spark) else spark.sparkContext
    warn_of_shared_gpus(spark, use_gpu)
    function = stage_function(ship(task, context), 0)
    sent = [
        T.StructField(n, f.dataType, f.nullable, f.metadata)
        for n, f in zip(wire, fields, strict=False)
    ]
    with this_interpreter(context):
        predicted = prepared.mapInArrow(function, T.StructType(sent))
    return predicted.toDF(*(f.name for f in fields))


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
