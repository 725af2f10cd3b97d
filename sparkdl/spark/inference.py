"""predict and evaluate: one narrow pass over the data, in batches, on the executors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data import Batch, DataSpec, decode
from sparkdl.errors import DataError, ResourceError
from sparkdl.learner.archive import ModelArchive
from sparkdl.learner.signature import Signature
from sparkdl.spark.cluster import is_connect
from sparkdl.spark.resources import UseGpu, needs_child, placement_of, start_framework
from sparkdl.spark.schema import make_spec, selection
from sparkdl.spark.sources import Columns, Source
from sparkdl.spark.task import RESULT_SCHEMA, Result, failure_result, to_batch

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class InferenceTask:
    """What an executor needs to run a model forward."""

    archive: ModelArchive
    spec: DataSpec
    batch_size: int
    use_gpu: UseGpu
    outputs: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()


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
        if name in frame.columns:
            raise DataError(
                f"the data already have a column {name!r}",
                expected="a new name for the predictions",
                received=str(frame.columns),
                hint="predict(..., output_column='another name')",
            )
    fields = list(frame.schema.fields)
    for output, name in names.items():
        fields.append(T.StructField(name, _output_type(signature.outputs[output].shape)))
    converted = tuple(
        name for name in spec.columns
        if isinstance(frame.schema[name].dataType, T.UserDefinedType)
    )  # fmt: skip
    prepared = frame
    if converted:
        # ML vectors travel twice: as they are for the result, as arrays for the model.
        arrays = dict(zip(spec.columns, selection(frame.schema, spec), strict=True))
        extra = [arrays[name].alias(_twin(name)) for name in converted]
        prepared = frame.select(*frame.columns, *extra)
        spec = _renamed(spec, converted)
    task = InferenceTask(archive, spec, batch_size, use_gpu, tuple(names), converted)
    spark = frame.sparkSession
    pickled = cloudpickle.dumps(task)
    payload = pickled if is_connect(spark) else spark.sparkContext.broadcast(pickled)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.inference import predict_batches

        yield from predict_batches(batches, payload.value if hasattr(payload, "value") else payload)

    return prepared.mapInArrow(run, T.StructType(fields))


def predict_batches(
    batches: Iterator[pa.RecordBatch], pickled: bytes
) -> Iterator[pa.RecordBatch]:
    """On the executor: each Arrow batch with its predictions appended."""
    task, learner = _open(pickled)
    row = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        inputs = decode(batch, task.spec, row)
        row += batch.num_rows
        parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in task.outputs}
        for start in range(0, batch.num_rows, task.batch_size):
            stop = start + task.batch_size
            outputs = learner.predict({k: v[start:stop] for k, v in inputs.x.items()})
            if set(outputs) != set(task.outputs):
                outputs = dict(zip(task.outputs, outputs.values(), strict=True))
            for name in task.outputs:
                parts[name].append(np.asarray(outputs[name], np.float32))
        kept = batch.num_columns - len(task.converted)
        predictions = [_to_arrow(np.concatenate(parts[name])) for name in task.outputs]
        names = [*batch.schema.names[:kept], *(f"prediction_{n}" for n in task.outputs)]
        yield pa.RecordBatch.from_arrays([*batch.columns[:kept], *predictions], names=names)


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


def _twin(name: str) -> str:
    return f"__sparkdl_{name}"


def _renamed(spec: DataSpec, converted: tuple[str, ...]) -> DataSpec:
    from dataclasses import replace

    features = {
        name: replace(
            s, columns=tuple(_twin(c) if c in converted else c for c in s.columns)
        )
        for name, s in spec.features.items()
    }
    return replace(spec, features=features)


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

    from sparkdl.spark.sources import rdd_features

    task = InferenceTask(
        archive, DataSpec(rdd_features(signature)), batch_size, use_gpu, tuple(signature.outputs)
    )
    payload = rdd.context.broadcast(cloudpickle.dumps(task))

    def run(rows: Iterable[Any]) -> Iterator[Any]:
        from sparkdl.spark.inference import predict_rows

        yield from predict_rows(rows, payload.value)

    return rdd.mapPartitions(run)


def predict_rows(rows: Iterable[Any], pickled: bytes) -> Iterator[Any]:
    """On the executor: predictions for an iterator of examples, a batch at a time."""
    from itertools import islice

    from sparkdl.spark.sources import stack_inputs

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

    from sparkdl.spark.training import raise_failure

    task = InferenceTask(archive, source.spec, batch_size, use_gpu)
    spark = source.spark
    pickled = cloudpickle.dumps(task)
    broadcast = None if is_connect(spark) else spark.sparkContext.broadcast(pickled)
    payload: Any = pickled if broadcast is None else broadcast

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.inference import evaluate_batches

        yield from evaluate_batches(batches, payload.value if hasattr(payload, "value") else payload)

    rows = source.frame.mapInArrow(run, RESULT_SCHEMA).collect()
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


def evaluate_batches(
    batches: Iterator[pa.RecordBatch], pickled: bytes
) -> Iterator[pa.RecordBatch]:
    """On the executor: the metric state of one partition."""
    from pyspark import TaskContext

    context = TaskContext.get()
    rank = context.partitionId() if context is not None else 0
    try:
        task, learner = _open(pickled)
        state = learner.evaluate(evaluation_windows(batches, task.spec, task.batch_size))
        results = [Result(rank, "metrics", json.dumps(state.tolist()))] if state.size else []
    except Exception as error:
        results = [failure_result(rank, error)]
    yield to_batch(results)


@dataclass(frozen=True)
class _Window:
    x: Arrays
    y: Arrays
    sample_weight: Arrays | None
    num_batches: int
    num_rows: int


def evaluation_windows(
    batches: Iterator[pa.RecordBatch], spec: DataSpec, batch_size: int
) -> Iterator[_Window]:
    """Arrow batches as windows of one step each; never more than one Arrow batch in memory."""
    row = 0
    for record in batches:
        if not record.num_rows:
            continue
        decoded = decode(record, spec, row)
        row += record.num_rows
        for start in range(0, record.num_rows, batch_size):
            yield _window(decoded, start, min(start + batch_size, record.num_rows))


def _window(batch: Batch, start: int, stop: int) -> _Window:
    def cut(arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        return {name: array[None, start:stop] for name, array in arrays.items()}

    weight = None if batch.sample_weight is None else cut(batch.sample_weight)
    return _Window(cut(batch.x), cut(batch.y), weight, 1, stop - start)

