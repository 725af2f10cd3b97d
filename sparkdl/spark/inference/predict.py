"""predict: one narrow pass over the data, a batch at a time, when the rows are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl import payload
from sparkdl.config import UseGpu
from sparkdl.data import Batch, DataSpec, decode_slices
from sparkdl.errors import DataError
from sparkdl.launch.task import RankContext
from sparkdl.learner.archive import ModelArchive
from sparkdl.learner.signature import Signature
from sparkdl.protocols import Learner
from sparkdl.spark.columns.matching import make_spec
from sparkdl.spark.columns.pairs import rdd_features, stack_inputs
from sparkdl.spark.columns.sources import Columns
from sparkdl.spark.columns.wire import selection, wire_names
from sparkdl.spark.driver.cluster import is_connect, require_running
from sparkdl.spark.driver.interpreter import this_interpreter
from sparkdl.spark.driver.launcher import ship
from sparkdl.spark.executor.stage import content_of, run_task, stage_function
from sparkdl.spark.inference.model_task import ModelTask

_RETURNED_BYTES = 16 << 20
"""Predictions of so many bytes are returned before the rest of their Arrow batch is decoded."""

# -- a DataFrame --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictTask(ModelTask):
    """Appends predictions to Arrow batches; see :class:`sparkdl.launch.task.Task`.

    Args:
        outputs: Names of the outputs, in the order of the prediction columns.
        kept: Columns that come back as they are: the first so many.
        positions: Where each of ``spec.columns`` is among the columns sent.
    """

    outputs: tuple[str, ...]
    kept: int
    positions: tuple[int, ...]

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows with their predictions; the next are read when these have been taken."""
        learner = self.learner(rank)
        first_row = 0
        for batch in batches:
            columns = [batch.column(i) for i in self.positions]
            sent = pa.RecordBatch.from_arrays(columns, names=list(self.spec.columns))
            done = start = 0  # rows of the batch that have been returned, and predicted
            parts: list[list[Any]] = []
            size_bytes = 0
            for inputs in decode_slices(sent, self.spec, self.batch_size, first_row):
                parts.append(self._predicted(learner, inputs))
                start += inputs.num_rows
                size_bytes += sum(array.nbytes for array in parts[-1])
                if size_bytes >= _RETURNED_BYTES:
                    yield self._with_predictions(batch.slice(done, start - done), parts)
                    done, parts, size_bytes = start, [], 0
            if parts:
                yield self._with_predictions(batch.slice(done), parts)
            first_row += batch.num_rows

    def _predicted(self, learner: Learner, inputs: Batch) -> list[Any]:
        """The outputs for some rows as Arrow arrays, in the order of ``outputs``."""
        outputs = learner.predict(inputs.x)
        if set(outputs) != set(self.outputs):
            outputs = dict(zip(self.outputs, outputs.values(), strict=True))
        return [_to_arrow(np.asarray(outputs[name], np.float32)) for name in self.outputs]

    def _with_predictions(self, rows: pa.RecordBatch, parts: list[list[Any]]) -> pa.RecordBatch:
        predictions = [pa.concat_arrays(arrays) for arrays in zip(*parts, strict=True)]
        columns = [*rows.columns[: self.kept], *predictions]
        return pa.RecordBatch.from_arrays(columns, names=wire_names(len(columns)))


def predict_frame(
    frame: Any,
    signature: Signature,
    archive: ModelArchive,
    columns: Columns,
    *,
    batch_size: int,
    use_gpu: UseGpu,
    output_column: str,
) -> Any:
    """The frame with a prediction column; rows keep their order, and nothing runs yet.

    One output of one value per row becomes a ``float`` column, any other a (nested) array of
    floats. Several outputs become one column each, ``<output_column>_<output name>``.

    Raises:
        DataError: The columns do not fit, or a prediction column exists already.
    """
    from pyspark.sql import types as T

    require_running(frame.sparkSession)
    spec = make_spec(
        frame.schema, signature, columns.features, None, None, columns.decoder, pad=columns.pad
    )
    names = _output_columns(signature, output_column)
    for name in names.values():
        if name.lower() in (column.lower() for column in frame.columns):
            raise DataError(
                f"the data already have a column {name!r}",
                expected="a new name for the predictions",
                received=str(frame.columns),
                hint="predict(..., output_column='another name')",
            )
    fields = [
        *frame.schema.fields,
        *(T.StructField(n, _output_type(signature.outputs[o].shape)) for o, n in names.items()),
    ]
    # All columns travel under wire names, and get their own back on the driver. ML vectors travel
    # twice: as they are for the result, as arrays for the model.
    count = len(frame.schema.fields)
    wire = wire_names(len(fields) + len(spec.columns))
    vectors = [
        name for name in spec.columns
        if isinstance(frame.schema[name].dataType, T.UserDefinedType)
    ]  # fmt: skip
    positions = {name: frame.schema.names.index(name) for name in spec.columns}
    prepared = frame
    if vectors:
        copies = dict(zip(vectors, range(count, count + len(vectors)), strict=True))
        arrays = selection(
            frame.schema, spec, [wire[{**positions, **copies}[n]] for n in positions]
        )
        chosen = [a for a, n in zip(arrays, spec.columns, strict=True) if n in copies]
        prepared = frame.select("*", *chosen)
        positions |= copies
    prepared = prepared.toDF(*wire[: len(prepared.columns)])
    task = PredictTask(
        archive, spec, batch_size, use_gpu, tuple(names), count,
        tuple(positions[name] for name in spec.columns),
    )  # fmt: skip
    spark = frame.sparkSession
    context = None if is_connect(spark) else spark.sparkContext
    function = stage_function(ship(task, context), 0)
    sent = [
        T.StructField(n, f.dataType, f.nullable, f.metadata)
        for n, f in zip(wire, fields, strict=False)
    ]
    with this_interpreter(context):
        predicted = prepared.mapInArrow(function, T.StructType(sent))
    return predicted.toDF(*(f.name for f in fields))


def _output_columns(signature: Signature, output_column: str) -> dict[str, str]:
    if len(signature.outputs) == 1:
        return {next(iter(signature.outputs)): output_column}
    return {name: f"{output_column}_{name}" for name in signature.outputs}


def _output_type(shape: Any) -> Any:
    from pyspark.sql import types as T

    if shape is None:
        return T.ArrayType(T.FloatType())
    kind: Any = T.FloatType()
    if tuple(shape) not in ((), (1,)):
        for _ in shape:
            kind = T.ArrayType(kind)
    return kind


def _to_arrow(array: npt.NDArray[Any]) -> Any:
    if array.ndim == 1 or array.shape[1:] == (1,):
        return pa.array(np.ascontiguousarray(array.reshape(-1)), pa.float32())
    values: Any = pa.array(np.ascontiguousarray(array).reshape(-1), pa.float32())
    for axis in range(array.ndim - 1, 0, -1):
        count = int(np.prod(array.shape[:axis]))
        offsets = np.arange(count + 1, dtype=np.int32) * array.shape[axis]
        values = pa.ListArray.from_arrays(pa.array(offsets), values)
    return values


# -- an RDD -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictRowsTask(ModelTask):
    """Predicts stacked inputs, one pickled dict of arrays per Arrow batch; see :class:`Task`."""

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The outputs of each batch, in the same form."""
        learner = self.learner(rank)
        for batch in batches:
            yield _pack(learner.predict(_unpack(batch)))


def predict_rdd(
    rdd: Any,
    signature: Signature,
    archive: ModelArchive,
    *,
    batch_size: int,
    use_gpu: UseGpu,
) -> Any:
    """An RDD of predictions (NumPy arrays), one per element and in the same order.

    Elements are inputs ``x``; pairs ``(x, y)`` and ``LabeledPoint`` are taken without their label.
    """
    task = PredictRowsTask(archive, DataSpec(rdd_features(signature)), batch_size, use_gpu)
    shipped = ship(task, rdd.context)

    def run(rows: Iterable[Any]) -> Iterator[Any]:
        from sparkdl.spark.inference.predict import predict_rows

        yield from predict_rows(rows, content_of(shipped))

    from pyspark import RDD

    with this_interpreter(rdd.context) as another:
        predicted = rdd.mapPartitions(run)
        # PySpark chooses the interpreter when it makes the Java side, and again for every function
        # that it joins with this one; a plain RDD is not joined.
        if another:
            predicted = RDD(predicted._jrdd, rdd.context, predicted._jrdd_deserializer)
    return predicted


def predict_rows(rows: Iterable[Any], content: bytes) -> Iterator[Any]:
    """On the executor: predictions for an iterator of examples, a batch at a time."""
    task: PredictRowsTask = payload.load(content)
    iterator = iter(rows)

    def batches() -> Iterator[pa.RecordBatch]:
        number = 0
        while chunk := list(islice(iterator, task.batch_size)):
            yield _pack(stack_inputs(chunk, task.spec.features, number))
            number += len(chunk)

    for batch in run_task(batches(), content):
        outputs = _unpack(batch)
        if len(outputs) == 1:
            yield from next(iter(outputs.values()))
        else:
            for values in zip(*outputs.values(), strict=True):
                yield dict(zip(outputs, values, strict=True))


def _pack(arrays: dict[str, npt.NDArray[Any]]) -> pa.RecordBatch:
    content = pa.array([pickle.dumps(arrays, protocol=5)], pa.large_binary())
    return pa.RecordBatch.from_arrays([content], names=["arrays"])


def _unpack(batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = pickle.loads(batch.column(0)[0].as_py())
    return arrays
