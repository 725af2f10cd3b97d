"""predict for an RDD: a model's outputs for one element after the other."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession

from sparkdl import payload
from sparkdl.config import UseGpu
from sparkdl.data import DataSpec
from sparkdl.launch.task import RankContext
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.spark.columns.pairs import rdd_features, stack_inputs
from sparkdl.spark.driver.launcher import ship
from sparkdl.spark.executor.stage import content_of, run_task
from sparkdl.spark.inference.predictor_task import PredictorTask
from sparkdl.spark.inference.shared_gpus import warn_of_shared_gpus
from sparkdl.spark.session.interpreter import with_this_interpreter


@dataclass(frozen=True)
class PredictRowsTask(PredictorTask):
    """Predicts stacked inputs, one pickled dict of arrays per Arrow batch."""

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The outputs of each batch, in the same form."""
        with self.predictor(rank.resources) as predictor:
            for batch in batches:
                yield _pack(predictor.predict(_unpack(batch), self.batch_size))


def predict_rdd(
    rdd: Any,
    archive: PredictorArchive,
    *,
    batch_size: int,
    use_gpu: UseGpu,
) -> Any:
    """An RDD of predictions (NumPy arrays), one per element and in the same order.

    Elements are inputs ``x``; pairs ``(x, y)`` and ``LabeledPoint`` are taken without their label.
    """
    warn_of_shared_gpus(SparkSession.getActiveSession(), use_gpu)
    task = PredictRowsTask(archive, DataSpec(rdd_features(archive.signature)), batch_size, use_gpu)
    shipped = ship(task, rdd.context)

    def run(rows: Iterable[Any]) -> Iterator[Any]:
        from sparkdl.spark.inference.predict_rdd import predict_rows

        yield from predict_rows(rows, content_of(shipped))

    return with_this_interpreter(rdd.mapPartitions(run))


def predict_rows(rows: Iterable[Any], content: bytes | bytearray) -> Iterator[Any]:
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
