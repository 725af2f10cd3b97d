"""predict and evaluate: one narrow pass over the data, in batches, on the executors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.config import UseGpu
from sparkdl.data import Batch, Batches, DataSpec, decode, rows_from_numpy
from sparkdl.errors import DataError, ResourceError, WorkerError
from sparkdl.launch.devices import needs_child, placement_of, start_framework
from sparkdl.launch.results import RESULT_SCHEMA, Result, failure_result, to_batch
from sparkdl.learner.archive import ModelArchive
from sparkdl.learner.signature import Signature
from sparkdl.protocols import Arrays, BatchStack
from sparkdl.spark.columns.matching import make_spec
from sparkdl.spark.columns.sources import Columns, Source, wanted_spec
from sparkdl.spark.columns.wire import named_batches, selection, wire_names
from sparkdl.spark.driver.cluster import is_connect


@dataclass(frozen=True)
class InferenceTask:
    """What an executor needs to run a model forward.

    Args:
        archive: The model.
        spec: The columns to read.
        batch_size: Rows per forward pass.
        use_gpu: See :class:`sparkdl.SparkModel`.
        outputs: Names of the outputs, in the order of the prediction columns.
        kept: Columns that come back as they are: the first so many.
        positions: Where each of ``spec.columns`` is among the columns sent.
    """

    archive: ModelArchive
    spec: DataSpec
    batch_size: int
    use_gpu: UseGpu
    outputs: tuple[str, ...] = ()
    kept: int = 0
    positions: tuple[int, ...] = ()


# -- predict a DataFrame ------------------------------------------------------------------------


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
    import cloudpickle
    from pyspark.sql import types as T

    spec = make_spec(frame.schema, signature, columns.features, None, None, columns.decoder)
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
        twins = dict(zip(vectors, range(count, count + len(vectors)), strict=True))
        arrays = selection(frame.schema, spec, [wire[{**positions, **twins}[n]] for n in positions])
        chosen = [a for a, n in zip(arrays, spec.columns, strict=True) if n in twins]
        prepared = frame.select("*", *chosen)
        positions |= twins
    prepared = prepared.toDF(*wire[: len(prepared.columns)])
    task = InferenceTask(
        archive, spec, batch_size, use_gpu, tuple(names), count,
        tuple(positions[name] for name in spec.columns),
    )  # fmt: skip
    spark = frame.sparkSession
    pickled = cloudpickle.dumps(task)
    payload = pickled if is_connect(spark) else spark.sparkContext.broadcast(pickled)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.inference.inference import predict_batches

        yield from predict_batches(batches, payload.value if hasattr(payload, "value") else payload)

    sent = [
        T.StructField(n, f.dataType, f.nullable, f.metadata)
        for n, f in zip(wire, fields, strict=False)
    ]
    return prepared.mapInArrow(run, T.StructType(sent)).toDF(*(f.name for f in fields))


def predict_batches(batches: Iterator[pa.RecordBatch], pickled: bytes) -> Iterator[pa.RecordBatch]:
    """On the executor: each Arrow batch with its predictions appended."""
    task, learner = _open(pickled)
    row = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        columns = [batch.column(i) for i in task.positions]
        inputs = decode(
            pa.RecordBatch.from_arrays(columns, names=list(task.spec.columns)), task.spec, row
        )
        row += batch.num_rows
        parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in task.outputs}
        for start in range(0, batch.num_rows, task.batch_size):
            stop = start + task.batch_size
            outputs = learner.predict({k: v[start:stop] for k, v in inputs.x.items()})
            if set(outputs) != set(task.outputs):
                outputs = dict(zip(task.outputs, outputs.values(), strict=True))
            for name in task.outputs:
                parts[name].append(np.asarray(outputs[name], np.float32))
        predictions = [_to_arrow(np.concatenate(parts[name])) for name in task.outputs]
        columns = [*batch.columns[: task.kept], *predictions]
        yield pa.RecordBatch.from_arrays(columns, names=wire_names(len(columns)))


def _open(pickled: bytes) -> tuple[InferenceTask, Any]:
    import cloudpickle
    from pyspark import TaskContext

    task: InferenceTask = cloudpickle.loads(pickled)
    context = TaskContext.get()
    placement = placement_of(context, task.archive.backend, task.use_gpu)
    if needs_child(placement):
        raise ResourceError(
            "this reused Python worker runs a framework on other devices",
            expected=f"{placement.backend} on {placement.gpus or 'the CPU'}",
            received="an earlier task's devices",
            hint="spark.python.worker.reuse=false, or use the same use_gpu for all calls",
        )
    start_framework(placement)
    from sparkdl.learner.cache import cached_learner

    return task, cached_learner(task.archive)


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


# -- predict an RDD -----------------------------------------------------------------------------


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
    import cloudpickle

    from sparkdl.spark.columns.pairs import rdd_features

    task = InferenceTask(
        archive, DataSpec(rdd_features(signature)), batch_size, use_gpu, tuple(signature.outputs)
    )
    payload = rdd.context.broadcast(cloudpickle.dumps(task))

    def run(rows: Iterable[Any]) -> Iterator[Any]:
        from sparkdl.spark.inference.inference import predict_rows

        yield from predict_rows(rows, payload.value)

    return rdd.mapPartitions(run)


def predict_rows(rows: Iterable[Any], pickled: bytes) -> Iterator[Any]:
    """On the executor: predictions for an iterator of examples, a batch at a time."""
    from itertools import islice

    from sparkdl.spark.columns.pairs import stack_inputs

    task, learner = _open(pickled)
    iterator = iter(rows)
    number = 0
    while chunk := list(islice(iterator, task.batch_size)):
        inputs = stack_inputs(chunk, task.spec.features, number)
        number += len(chunk)
        outputs = learner.predict(inputs)
        if len(outputs) == 1:
            yield from next(iter(outputs.values()))
        else:
            for i in range(len(chunk)):
                yield {name: array[i] for name, array in outputs.items()}


# -- evaluate -----------------------------------------------------------------------------------


def evaluate_source(
    source: Source, archive: ModelArchive, *, batch_size: int, use_gpu: UseGpu
) -> npt.NDArray[np.float64]:
    """The metric state over all rows: the sum of the partitions' states.

    Raises:
        WorkerError: A task raised.
        DataError: The data do not fit, or there are none.
    """
    import cloudpickle
    from pyspark.errors import PySparkException

    from sparkdl.spark.driver.training import raise_failure

    task = InferenceTask(archive, source.spec, batch_size, use_gpu)
    spark = source.spark
    pickled = cloudpickle.dumps(task)
    broadcast = None if is_connect(spark) else spark.sparkContext.broadcast(pickled)
    payload: Any = pickled if broadcast is None else broadcast

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.inference.inference import evaluate_batches

        yield from evaluate_batches(
            batches, payload.value if hasattr(payload, "value") else payload
        )

    try:
        rows = source.frame.mapInArrow(run, RESULT_SCHEMA).collect()
    except PySparkException as error:
        raise WorkerError(
            -1, f"Spark gave the evaluation up: {str(error).strip().splitlines()[0]}", str(error)
        ) from error
    finally:
        if broadcast is not None:
            broadcast.destroy()
    for row in rows:
        if row.kind == "failed":
            raise_failure(row.rank, json.loads(row.text))
    states = [np.asarray(json.loads(r.text), np.float64) for r in rows if r.kind == "metrics"]
    if not states:
        raise DataError(
            "there are no rows to evaluate", expected="at least one row", received="0 rows"
        )
    return np.sum(states, axis=0)  # type: ignore[no-any-return]


def evaluate_batches(batches: Iterator[pa.RecordBatch], pickled: bytes) -> Iterator[pa.RecordBatch]:
    """On the executor: the metric state of one partition."""
    from pyspark import TaskContext

    context = TaskContext.get()
    rank = context.partitionId() if context is not None else 0
    try:
        task, learner = _open(pickled)
        named = named_batches(batches, task.spec)
        state = learner.evaluate(evaluation_stacks(named, task.spec, task.batch_size))
        results = [Result(rank, "metrics", json.dumps(state.tolist()))] if state.size else []
    except Exception as error:
        results = [failure_result(rank, error)]
    yield to_batch(results)


def evaluation_stacks(
    batches: Iterator[pa.RecordBatch], spec: DataSpec, batch_size: int
) -> Iterator[BatchStack]:
    """Arrow batches as stacks of one batch each; never more than one Arrow batch in memory."""
    row = 0
    for record in batches:
        if not record.num_rows:
            continue
        decoded = decode(record, spec, row)
        row += record.num_rows
        for start in range(0, record.num_rows, batch_size):
            yield _stack_of_one(decoded, start, min(start + batch_size, record.num_rows))


def _stack_of_one(batch: Batch, start: int, stop: int) -> BatchStack:
    def cut(arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        return {name: array[None, start:stop] for name, array in arrays.items()}

    weight = None if batch.sample_weight is None else cut(batch.sample_weight)
    return BatchStack(cut(batch.x), cut(batch.y), weight, 1, stop - start)


def evaluate_arrays(
    model: Any, data: Sequence[Any], signature: Signature, *, batch_size: int
) -> npt.NDArray[np.float64]:
    """Evaluates small NumPy data here, without Spark.

    Args:
        model: Compiled.
        data: ``(x, y)`` or ``(x, y, sample_weight)``.
        signature: Of the model.
        batch_size: Rows per forward pass.

    Returns:
        The metric state.

    Raises:
        DataError: The data do not fit the model, or there are none.
    """
    from sparkdl.learner import make_learner

    x, y = data[0], data[1]
    weight = data[2] if len(data) == 3 else None
    rows = rows_from_numpy(x, y, weight, wanted_spec(x, y, weight, signature))
    stacks = Batches(rows, batch_size, shuffle=False).stacks(0, 8)
    state: npt.NDArray[np.float64] = np.asarray(make_learner(model).evaluate(stacks))
    if not state.size:
        raise DataError("there are no rows to evaluate", received="0 rows")
    return state
