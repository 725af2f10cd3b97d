"""One rank from its pickled task to its batches: here, or in a child process with other devices."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from sparkdl import payload
from sparkdl.failures import SECONDARY_DELAY_S, is_secondary
from sparkdl.launch.child import Child
from sparkdl.launch.devices import needs_child
from sparkdl.launch.task import RankContext, Task
from sparkdl.log_lines import Sink


def run_rank(
    content: bytes | bytearray,
    rank: RankContext,
    batches: Iterator[pa.RecordBatch],
    on_output: Sink,
) -> Iterator[pa.RecordBatch]:
    """Runs a task where its devices are; an exception becomes what the task makes of it.

    Args:
        content: The pickled task.
        rank: Which rank this is.
        batches: Its input.
        on_output: Takes the lines that a child process writes to its standard output and error.
    """
    task: Task = payload.load(content)
    try:
        if needs_child(task.devices.place(rank.resources, rank.rank)):
            with Child(content, rank, on_output) as child:
                yield from child.results(batches)
        else:
            del content  # the task has all of it
            yield from task.run(rank, batches)
    except (Exception, SystemExit) as error:
        if rank.gathering is not None and is_secondary(error):
            time.sleep(SECONDARY_DELAY_S)  # Spark ends all ranks with the first that tells
        yield from task.failed(rank, error)
