"""On the executor: rows of a DataFrame -> their predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as T

from sparkdl.launch.task import RankContext
from sparkdl.spark.columns.wire import wire_names
from sparkdl.spark.inference.forward import ForwardPass, HandleInvalid, Predicted
from sparkdl.spark.inference.output_columns import OutputColumn, with_nulls
from sparkdl.spark.inference.predictor_task import PredictorTask


@dataclass(frozen=True)
class PredictTask(PredictorTask):
    """Predictions for Arrow batches of the model's columns; see :class:`sparkdl.launch.task.Task`.

    Args:
        outputs: The columns of predictions.
        handle_invalid: What becomes of rows that no model can take.
    """

    outputs: tuple[OutputColumn, ...]
    handle_invalid: HandleInvalid = "error"

    @property
    def result(self) -> T.StructType:
        """The columns of predictions, in order, under wire names."""
        fields = [column.field(self.archive) for column in self.outputs]
        return T.StructType(
            [
                T.StructField(name, field.dataType)
                for name, field in zip(wire_names(len(fields)), fields, strict=True)
            ]
        )

    def forward(self, rank: RankContext) -> ForwardPass:
        """The model over the rows of one task of Spark."""
        return ForwardPass(
            self.spec, self.batch_size, self.outputs, self.archive, self.handle_invalid,
            lambda: self.predictor(rank.resources),
        )  # fmt: skip

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One column of structs, one for each row; null for a row that is to be left out."""
        names = list(self.spec.columns)
        sent = (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)
        with self.forward(rank) as forward:
            for predicted in forward.over(sent):
                yield pa.RecordBatch.from_arrays([_structs(predicted)], names=["predictions"])


@dataclass(frozen=True)
class AppendTask(PredictTask):
    """Appends predictions to Arrow batches, for a PySpark without functions on Arrow arrays.

    Args:
        kept: Columns that come back as they are: the first so many.
        positions: Where each of ``spec.columns`` is among the columns sent.
    """

    kept: int = 0
    positions: tuple[int, ...] = ()

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows with their predictions; the next are read when these have been taken."""
        rows: list[pa.RecordBatch] = []

        def sent() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                rows.append(batch)
                columns = [batch.column(i) for i in self.positions]
                yield pa.RecordBatch.from_arrays(columns, names=list(self.spec.columns))

        with self.forward(rank) as forward:
            for predicted in forward.over(sent()):
                taken = _take(rows, predicted.num_rows)
                if predicted.valid is not None:
                    taken = taken.filter(pa.array(predicted.valid))
                every = [*taken.columns[: self.kept], *predicted.columns]
                yield pa.RecordBatch.from_arrays(every, names=wire_names(len(every)))


def _take(rows: list[pa.RecordBatch], count: int) -> pa.RecordBatch:
    """The first ``count`` rows, which are no longer in ``rows`` then."""
    taken = []
    while count:
        first = rows.pop(0)
        if len(first) > count:
            rows.insert(0, first.slice(count))
        taken.append(first.slice(0, count))
        count -= len(taken[-1])
    if len(taken) == 1:
        return taken[0]
    # pa.concat_batches came with pyarrow 19.
    (joined,) = pa.Table.from_batches(taken).combine_chunks().to_batches()
    return joined


def _structs(predicted: Predicted) -> pa.Array:
    names = wire_names(len(predicted.columns))
    structs = pa.StructArray.from_arrays(predicted.columns, names=names)
    return structs if predicted.valid is None else with_nulls(structs, predicted.valid)
