"""Where a task of Spark becomes a rank: the function that ``mapInArrow`` calls on the executors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from sparkdl.launch.devices import Resources
from sparkdl.launch.rank import run_rank
from sparkdl.launch.task import RankContext
from sparkdl.spark.executor.barrier import BarrierGathering

MapInArrow = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def stage_function(shipped: Any, num_ranks: int) -> MapInArrow:
    """The function for ``mapInArrow``.

    Args:
        shipped: The pickled task, or Spark's broadcast of it.
        num_ranks: Ranks of the launch; 0 if only Spark knows.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.executor.stage import content_of, run_task

        yield from run_task(batches, content_of(shipped), num_ranks)

    return run


def content_of(shipped: Any) -> bytes:
    """A pickled task as it was shipped: by itself, or in Spark's broadcast."""
    content: bytes = shipped if isinstance(shipped, bytes) else shipped.value
    return content


def run_task(
    batches: Iterator[pa.RecordBatch], content: bytes, num_ranks: int = 0
) -> Iterator[pa.RecordBatch]:
    """Runs a pickled task as the rank that this task of Spark is."""
    from pyspark import TaskContext

    return run_rank(content, rank_of(TaskContext.get(), num_ranks), batches, _print_error)


def rank_of(context: Any, num_ranks: int) -> RankContext:
    """The rank that a task of Spark is.

    Args:
        context: Its ``TaskContext``; None outside of Spark.
        num_ranks: Ranks of the launch.
    """
    from pyspark import BarrierTaskContext

    if context is None:
        return RankContext(0, num_ranks=num_ranks)
    given = context.resources()
    gpus = tuple(str(a) for a in given["gpu"].addresses) if "gpu" in given else ()
    return RankContext(
        int(context.partitionId()),
        int(context.taskAttemptId()),  # unique, also among the attempts of a stage that runs again
        num_ranks,
        Resources(gpus, max(1, int(context.cpus()))),
        BarrierGathering(context) if isinstance(context, BarrierTaskContext) else None,
    )


def _print_error(line: str) -> None:
    """A child's output goes where this process' errors go: to the executor's log."""
    print(line, file=sys.stderr, flush=True)
