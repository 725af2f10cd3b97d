"""What runs on the executors for ``sparkdl.run``: each task of a barrier stage is one rank.

An exception is raised from the task with a description that the driver can read
(:mod:`sparkdl.launch.failures`): Spark then ends the other ranks of the stage.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from sparkdl.launch.devices import function_environment, function_needs_child, placement_of
from sparkdl.launch.failures import RankFailure, describe
from sparkdl.launch.function_child import call_in_child
from sparkdl.launch.function_task import FunctionTask, Outcome, call
from sparkdl.launch.gathering import TAKEN_ALONG_S, BarrierGathering
from sparkdl.launch.log_lines import Capture, log_through
from sparkdl.launch.log_stream import LineClient
from sparkdl.launch.results import CHUNK_BYTES, Result, to_batch


def gpus_of(context: Any, task: FunctionTask) -> tuple[str, ...] | None:
    """The GPUs that the function may see; None: Spark schedules none, so whatever is there."""
    gpus = placement_of(context, task.backend or "tensorflow", task.use_gpu).gpus
    return gpus if gpus or task.use_gpu is False else None


def function_stage(payload: Any) -> Any:
    """The function for ``mapInArrow``; ``payload`` is a broadcast, or the pickled task itself."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.executor.function_stage import run_function

        yield from run_function(batches, payload.value if hasattr(payload, "value") else payload)

    return run


def run_function(batches: Iterator[pa.RecordBatch], pickled: bytes) -> Iterator[pa.RecordBatch]:
    """One task of the barrier stage; yields the result in rows of bounded size.

    Raises:
        RankFailure: The function raised; Spark ends the other ranks.
    """
    import cloudpickle
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    for _ in batches:
        pass
    task: FunctionTask = cloudpickle.loads(pickled)
    rank = int(context.partitionId())
    lines = LineClient(task.address, task.token, rank)
    outcome, failure = None, None
    try:
        with log_through(lines.send), Capture(lines.send) if task.capture else _NOTHING:
            outcome = _call_on_devices(task, context, pickled, lines)
    except (Exception, SystemExit) as error:
        failure = getattr(error, "described", None) or describe(rank, error)
    kept = lines.close()
    if failure is not None:
        failure["lines"] = "\n".join(kept)[-2000:]
        if failure["taken_along"]:
            time.sleep(TAKEN_ALONG_S)
        raise RankFailure(failure)
    assert outcome is not None
    told = json.dumps({"communicator": outcome.communicator, "result": outcome.content is not None})
    yield to_batch([Result(rank, "done", told)])
    parts = [("log", "\n".join(kept).encode(errors="replace")), ("result", outcome.content or b"")]
    for kind, content in parts:
        for i in range(0, len(content), CHUNK_BYTES):
            yield to_batch([Result(rank, kind, "", content[i : i + CHUNK_BYTES])])


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _call_on_devices(
    task: FunctionTask, context: Any, pickled: bytes, lines: LineClient
) -> Outcome:
    gathering = BarrierGathering(context)
    gpus = gpus_of(context, task)
    if function_needs_child(gpus, task.backend):
        return call_in_child(pickled, gathering, gpus, lines.send)
    with function_environment(gpus, task.backend):
        return call(task, gathering)
