"""The function that ``mapInArrow`` calls on the executors: it makes a rank of a task of Spark."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from sparkdl.errors import SparkDLError, TransportError, WaitTimeoutError, fold
from sparkdl.failures import one_line
from sparkdl.launch.child import run_rank
from sparkdl.launch.devices import Resources
from sparkdl.launch.task import RankContext
from sparkdl.spark.forms.shared_rows import SharedRows, read_to_end
from sparkdl.spark.session.versions import whole_batches

_LEAVING_S = 1.5
"""Seconds that ranks are given to leave an exchange after the first has left it. If the stage ended
earlier, Spark 4.3 would end the executors of those that still wait."""
_ALL_COME_S = 10.0
"""Seconds after which a failure is told also where ranks are still to come."""


class BarrierGathering:
    """A barrier stage's ``allGather``; see :class:`sparkdl.launch.task.Gathering`.

    Args:
        context: The task's ``BarrierTaskContext``.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._waiting = threading.Event()
        self._left = threading.Event()
        self._left_at = 0.0

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order.

        When the stage ends meanwhile, Spark ends the executor of a task that waits here.

        Raises:
            WaitTimeoutError: Not all came in time. Spark does not say who is missing; the driver
                adds it where it can.
        """
        answers: list[list[str] | BaseException] = []

        def work() -> None:
            try:
                answers.append(list(self._context.allGather(text)))
            except BaseException as error:
                answers.append(error)
            self._left_at = time.monotonic()
            self._left.set()

        self._waiting.set()
        thread = threading.Thread(target=work, name="sparkdl-gather", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not answers:
            raise WaitTimeoutError(
                f"rank {self._context.partitionId()} waited for the other ranks to come",
                expected=f"all ranks within {timeout_s:g} s", received="not all of them",
                hint="one may hang while it imports a framework or unpickles the function",
            )  # fmt: skip
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    def settle(self) -> None:
        """Returns when every rank has left the exchange, as far as that can be known.

        Ranks look for its answer once a second, so the last one leaves a second after the first.
        """
        if self._waiting.is_set() and self._left.wait(_ALL_COME_S):
            time.sleep(max(0.0, self._left_at + _LEAVING_S - time.monotonic()))


MapInArrow = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class PieceBroadcast(Protocol):
    """Spark's broadcast of a piece of a pickled task."""

    @property
    def value(self) -> bytes:
        """The piece."""

    def destroy(self) -> None:
        """Frees it on all executors."""


@dataclass(frozen=True)
class TaskBroadcast:
    """A pickled task in several broadcasts, one after another.

    A JVM (the driver's, and each executor's) holds a broadcast as a whole in its heap while it
    passes it on. Afterwards its blocks may go to the disk.

    Args:
        pieces: Spark's broadcasts.
    """

    pieces: tuple[PieceBroadcast, ...]
    size_bytes: int

    def read(self) -> bytearray:
        """The task; on an executor."""
        content, filled = bytearray(self.size_bytes), 0
        for piece in self.pieces:
            value = piece.value
            content[filled : filled + len(value)] = value
            filled += len(value)
            # PySpark keeps what it has read of a broadcast, as long as the worker process is used
            # again: a large model's size once more. It is read from its file again where needed.
            if vars(piece).get("_path"):
                vars(piece).pop("_value", None)
        return content

    def destroy(self) -> None:
        for piece in self.pieces:
            piece.destroy()


@dataclass(frozen=True)
class TaskFile:
    """A pickled task in a file of the session's, where there are no broadcasts (Spark Connect).

    Args:
        name: Name of the file, as ``SparkFiles`` knows it on the executors.
    """

    name: str

    def read(self) -> bytes:
        from pyspark import SparkFiles

        with open(SparkFiles.get(self.name), "rb") as file:
            return file.read()

    def destroy(self) -> None:
        """Nothing: the file goes with the session."""


Shipped = bytes | TaskBroadcast | TaskFile
"""A pickled task on its way to the executors: by itself, in Spark's broadcasts, or in a file."""


def stage_function(shipped: Shipped, num_ranks: int, rows: SharedRows | None = None) -> MapInArrow:
    """The function for ``mapInArrow``.

    Args:
        shipped: The pickled task, or Spark's broadcasts of it.
        num_ranks: Ranks of the launch; 0 if only Spark knows.
        rows: Rows of a broadcast; None where the stage brings all of them.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.executor.stage import content_of, input_of, run_task

        return run_task(input_of(batches), content_of(shipped), num_ranks, rows)

    return run


def content_of(shipped: Shipped) -> bytes | bytearray:
    """A pickled task as it was shipped."""
    return shipped if isinstance(shipped, bytes) else shipped.read()


def run_task(
    batches: Iterator[pa.RecordBatch],
    content: bytes | bytearray,
    num_ranks: int = 0,
    rows: SharedRows | None = None,
) -> Iterator[pa.RecordBatch]:
    """Runs a pickled task as the rank that this task of Spark is, and reads its input to the end.

    Rows of a broadcast are read only by a task that wants them. An error of this library says what
    failed and where, so it comes without the frames between Spark's worker and that place; those
    of a user's code (a decoder) stay.
    """
    from pyspark import TaskContext

    batches = iter(batches)
    context = rank_of(TaskContext.get(), num_ranks)
    given = batches if rows is None else rows.given(batches, context.rank, num_ranks)
    rank = run_rank(content, context, given, _print_error)
    del content  # which may be large; the rank has it for as long as it needs it
    try:
        yield from rank
    except SparkDLError as error:
        raise fold(error) from error.__cause__
    read_to_end(batches)


def input_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows that Spark sends to a rank.

    Spark's own exception stays in the JVM: here the stream just ends in the middle. Spark tries
    again (where an executor was lost that held the rows), or tells the driver why it cannot.

    Raises:
        TransportError: Spark stopped sending.
    """
    try:
        yield from whole_batches(batches)
    except Exception as error:
        raise TransportError(
            "Spark stopped sending the rows of this rank", expected="an Arrow stream to its end",
            received=one_line(error),
            hint="an executor that held the rows was lost, or what computes them failed",
        ) from error  # fmt: skip


def rank_of(context: Any, num_ranks: int) -> RankContext:
    """The rank that a task of Spark is.

    Args:
        context: Its ``TaskContext``; None outside of Spark.
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
