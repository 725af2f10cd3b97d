"""What runs on the executors: one task trains one partition to the end of the fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from sparkdl.launch.devices import needs_child, placement_of
from sparkdl.launch.gathering import BarrierGathering
from sparkdl.launch.results import to_batch
from sparkdl.launch.train_child import ChildLost, train_in_child
from sparkdl.spark.executor.trainer import Identity, TrainTask, give_up, train_here


def stage_function(payload: Any) -> Any:
    """The function for ``mapInArrow``; ``payload`` is a broadcast, or the task itself."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.executor.train_stage import run_task

        yield from run_task(batches, payload.value if hasattr(payload, "value") else payload)

    return run


def run_task(batches: Iterator[pa.RecordBatch], pickled: bytes) -> Iterator[pa.RecordBatch]:
    """Trains a partition; an exception becomes a result row, so that Spark does not retry it.

    Spark retries what another try may mend: a lost executor, a killed process, a server that this
    host could not reach, memory that ran out.
    """
    import cloudpickle
    from pyspark import BarrierTaskContext, TaskContext

    context = TaskContext.get()
    barrier = isinstance(context, BarrierTaskContext)
    task: TrainTask = cloudpickle.loads(pickled)["task"]
    # A number that no other try has, not even one of a resubmitted stage.
    identity = Identity(context.partitionId(), context.taskAttemptId(), task.num_workers)
    if barrier:
        identity = replace(identity, gathering=BarrierGathering(context))
    try:
        placement = placement_of(context, task.archive.backend, task.use_gpu)
        if needs_child(placement):
            results = train_in_child(batches, pickled, identity, placement)
        else:
            results = train_here(batches, task, identity, placement)
    except ChildLost:
        raise
    except Exception as error:
        results = [give_up(task, identity, error)]
    for result in results:
        yield to_batch([result])
