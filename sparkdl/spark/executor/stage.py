"""The function that ``mapInArrow`` calls on the executors: it makes a rank of a task of Spark."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.errors import SparkDLError, TransportError, WaitTimeoutError, fold
from sparkdl.failures import one_line
from sparkdl.launch.child import run_rank
from sparkdl.launch.devices import Resources
from sparkdl.launch.task import RankContext
from sparkdl.process.payload import Pickled
from sparkdl.spark.forms.shared_rows import SharedRows, read_to_end
from sparkdl.spark.session.versions import ArrowFunction, whole_batches

if TYPE_CHECKING:
    from pyspark import Broadcast

_LEAVING_S = 1.5
"""Seconds that ranks are given to leave an exchange after the first has left it. If the stage ended
earlier, Spark 4.3 would end the executors of those that still wait."""
_ALL_COME_S = 10.0
"""Seconds after which a failure is told also where ranks are still to come."""


class BarrierGathering:
    """A barrier stage's ``allGather``; see :class:`sparkdl.launch.task.Gathering`."""

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


@dataclass(frozen=True)
class TaskPieces:
    """A pickled task in Spark's broadcasts; in a session's files on Spark Connect, without them.

    A JVM (the driver's, and each executor's) holds a broadcast as a whole in its heap while it
    passes it on. Afterwards its blocks may go to the disk.

    Args:
        pieces: Broadcasts, or names of files as ``SparkFiles`` knows them on the executors.
        sizes: See :class:`sparkdl.process.payload.Pickled`.
    """

    pieces: tuple[Broadcast[bytes] | str, ...]
    sizes: tuple[int, ...]

    def read(self) -> Pickled:
        """The task; on an executor, where only what Spark encrypts is not in files."""
        from pyspark import SparkFiles

        return Pickled(
            tuple(
                SparkFiles.get(p) if isinstance(p, str) else vars(p).get("_path") or p.value
                for p in self.pieces
            ),
            self.sizes,
        )

    def destroy(self) -> None:
        """Frees the broadcasts; files go with the session."""
        for piece in self.pieces:
            if not isinstance(piece, str):
                piece.destroy()


Shipped = bytes | TaskPieces
"""A pickled task on its way to the executors: by itself, or in pieces."""


def stage_function(
    shipped: Shipped, num_ranks: int, rows: SharedRows | None = None
) -> ArrowFunction:
    """The function for ``mapInArrow``.

    Args:
        num_ranks: Ranks of the launch; 0 if only Spark knows.
        rows: Rows of a broadcast; None where the stage brings all of them.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.executor.stage import input_of, run_task

        return run_task(input_of(batches), shipped, num_ranks, rows)

    return run


def content_of(shipped: Shipped) -> bytes | Pickled:
    """A pickled task as it was shipped."""
    return shipped if isinstance(shipped, bytes) else shipped.read()


def run_task(
    batches: Iterator[pa.RecordBatch],
    shipped: Shipped,
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
    try:
        yield from run_rank(content_of(shipped), context, given, _print_error)
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
