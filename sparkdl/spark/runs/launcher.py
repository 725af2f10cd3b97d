"""Ranks as the tasks of one Spark stage."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import DataError, SparkDLError, TransportError, WorkerError
from sparkdl.failures import RankFailure, RanksLost, failure_in, root_cause
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.launch import interrupts
from sparkdl.launch.task import CHUNK_BYTES, RESULT_SCHEMA, Result, Row, Task, failures_of, join
from sparkdl.process import payload
from sparkdl.spark.executor.stage import Shipped, TaskPieces, stage_function
from sparkdl.spark.forms.shared_rows import SharedRows
from sparkdl.spark.runs.capacity import SparkJob, barrier_refusal
from sparkdl.spark.runs.resources import Setting, memory_hint
from sparkdl.spark.session.running import (
    context_of,
    interpreter_of,
    interpreter_problem,
    session_problem,
    this_interpreter,
)
from sparkdl.spark.session.spark_errors import lost_rank, reason_of, rows_refused, was_cancelled
from sparkdl.spark.session.versions import arrow_stage

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

RESULT_BYTES = 32 << 20
"""Bytes that come in one job, if each row is as large as it can be."""
_PLACE = "place"


def collect_in_pieces(results: Any) -> list[Row]:
    """The rows of a stage that has not begun, in their order within each partition."""
    from pyspark.sql import functions as f
    from pyspark.storagelevel import StorageLevel

    placed = results.withColumn(_PLACE, f.monotonically_increasing_id())
    kept = placed.persist(StorageLevel.DISK_ONLY)
    try:
        # The stage runs here, once: its rows are on the disks before the first column is read.
        places = sorted(int(row[_PLACE]) for row in kept.select(_PLACE).collect())
        names = [column.split()[0] for column in RESULT_SCHEMA.split(", ")]
        rows: list[Any] = []
        at_once = max(1, RESULT_BYTES // CHUNK_BYTES)
        for first in range(0, len(places), at_once):
            ends = places[first], places[first : first + at_once][-1]
            part = kept.where(f.col(_PLACE).between(*ends)).select(_PLACE, *names).collect()
            rows += sorted(part, key=lambda row: int(row[_PLACE]))
        return rows
    finally:
        with contextlib.suppress(Exception):  # the session may be gone, and the error says so
            kept.unpersist()


def rows_problem(error: BaseException) -> DataError | None:
    """The error to raise where the expressions of the DataFrame itself failed; None for others."""
    received = rows_refused(error)
    if received is None:
        return None
    return DataError(
        "the DataFrame's own expressions or files fail on some rows",
        expected="rows that Spark can compute",
        received=received,
        hint="df.write.format('noop').mode('overwrite').save() computes all of them, without "
        "training; Spark's error follows from there",
    )


INLINE_BYTES = 900_000
"""A task up to this size travels inside the job, which is 0.05 s sooner than a broadcast of its own
(PySpark itself broadcasts functions of 1 MiB and more)."""

FILE_BYTES = 32 << 20
"""A larger task goes over Spark Connect as a file: each is kept until the session ends."""


@dataclass(frozen=True)
class SparkLauncher:
    """Starts a rank for each partition of a frame, which is the rank's input.

    Args:
        num_ranks: Its partitions; 0 if only Spark knows them.
        barrier: Whether all ranks start together, or none does.
        noun: What the stage is, in errors.
        profile: What each task asks of its executor; None for the application's settings.
        rows: Rows of a broadcast that the ranks take instead, or besides; None for the frame's.
    """

    frame: DataFrame
    num_ranks: int
    barrier: bool
    description: str
    noun: str
    profile: ResourceProfile | None = None
    rows: SharedRows | None = None

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[SparkRanks]:
        """Starts the stage; leaving cancels it. See :class:`sparkdl.launch.task.Launcher`."""
        spark = self.frame.sparkSession
        context = context_of(spark)
        shipped = ship(task, context, spark)
        is_large = context is None and isinstance(shipped, TaskPieces)  # and so may results be
        function = stage_function(shipped, self.num_ranks, self.rows)

        def run() -> Any:
            with this_interpreter(context):
                results = arrow_stage(
                    self.frame, function, RESULT_SCHEMA, barrier=self.barrier, profile=self.profile
                )
            return collect_in_pieces(results) if is_large else results.collect()

        stage = SparkJob(spark, run, self.description)
        try:
            stage.start()
            yield SparkRanks(spark, stage, self.num_ranks, self.noun, interpreter_of(context))
        finally:
            try:
                stage.cancel()
            finally:
                if not isinstance(shipped, bytes):
                    with contextlib.suppress(Exception):
                        shipped.destroy()


@dataclass(eq=False)
class SparkRanks:
    """The ranks of a stage; see :class:`sparkdl.launch.task.Ranks`.

    Args:
        noun: What the stage is, in errors.
        interpreter: The Python that Spark starts for it, in errors.
    """

    spark: SparkSession
    stage: SparkJob
    num_ranks: int
    noun: str
    interpreter: str

    @property
    def running(self) -> bool:
        """Whether the stage has begun and has not ended."""
        return self.stage.running

    def wait(self, timeout_s: float) -> bool:
        """Waits until the stage has ended; False if it still runs."""
        return self.stage.wait(timeout_s)

    def results(self) -> list[Result]:
        error = self.stage.error
        if error is None:
            # PySpark takes rows that were cut off for all of them: the JVM must still be there.
            problem = session_problem(self.spark)
            if isinstance(problem, TransportError):
                raise problem
            return join(self.stage.result)
        if isinstance(error, SparkDLError):
            raise error
        refused = barrier_refusal(error, self.num_ranks)
        if refused is not None:
            raise refused from error
        failure = failure_in(error)
        if failure is not None:
            raise RankFailure(failure) from error
        problem = (
            session_problem(self.spark)
            or interpreter_problem(error, self.interpreter)
            or rows_problem(error)
        )
        if problem is not None:
            raise problem from error
        if was_cancelled(error):  # by somebody: to begin again would defy them
            raise WorkerError(
                -1, f"the Spark job of the {self.noun} was cancelled", str(error)[:8000],
                "by Spark's web page, spark.sparkContext.cancelAllJobs(), an interrupt of its job "
                "tag or group, or a notebook's stop button",
            ) from error  # fmt: skip
        raise _lost(error, self.noun, self._setting) from error

    def results_so_far(self) -> list[Result]:
        """None: Spark has the results at the end of the stage."""
        return []

    def _setting(self, name: str) -> str | None:
        found = self.spark.conf.get(name, None)
        return None if found is None else str(found)


def run_on_partitions(frame: DataFrame, task: Task, what: str) -> list[Result]:
    """The results of a task for each partition of a frame, when all have ended.

    Args:
        task: A :class:`sparkdl.launch.task.ReturningTask`.
        what: Says in Spark's list of jobs, and in errors, what the job is.

    Raises:
        SparkDLError: What a task raised; of several the first cause.
    """
    launcher = SparkLauncher(frame, 0, barrier=False, description=f"sparkdl: {what}", noun=what)
    with interrupts.CleanStack() as stack:
        ranks = stack.begin(launcher.launch(task))
        while not ranks.wait(0.1):
            interrupts.check()
        results = ranks.results()
    cause = root_cause(failures_of(results))
    if cause is not None:
        raise cause.library_error()
    return results


def ship(task: Task, context: Any | None, connect: object = None) -> Shipped:
    """A pickled task on its way to the executors: as it is, or a large one in Spark's broadcasts.

    Args:
        context: The SparkContext; None over Spark Connect, which has no broadcasts.
        connect: Without a context the session, if a large task may stay in it as a file.
    """
    apart: list[payload.Buffer] = []
    content, _ = payload.dump_with_packages(task, apart)
    buffers = [content, *apart]
    sizes = tuple(map(len, buffers))
    if context is not None and sum(sizes) > INLINE_BYTES:
        return TaskPieces(tuple(map(context.broadcast, payload.pieces_of(buffers))), sizes)
    if context is None and connect is not None and sum(sizes) > FILE_BYTES:
        return TaskPieces(_in_files(connect, payload.pieces_of(buffers)), sizes)
    return payload.dump(task) if apart else content


def _in_files(spark: SparkSession, pieces: Iterable[bytes]) -> tuple[str, ...]:
    """Names of files of a session of Spark Connect, whose plans have at most 128 MiB."""
    with TemporaryFolder() as folder:
        paths = []
        for piece in pieces:
            paths.append(os.path.join(folder.path, f"sparkdl-task-{secrets.token_hex(8)}"))
            with open(paths[-1], "wb") as file:
                pickle.dump(piece, file, pickle.HIGHEST_PROTOCOL)
        spark.addArtifacts(*paths, file=True)
    return tuple(map(os.path.basename, paths))


def _lost(error: BaseException, noun: str, setting: Setting) -> RanksLost:
    """Ranks that ended without a description; of a barrier stage Spark's message names one."""
    return RanksLost(
        lost_rank(error),
        f"Spark gave the {noun} up: {reason_of(error)}",
        str(error)[:8000],
        hint=memory_hint(str(error), setting)
        or "a process that was killed (memory?), a lost executor that cannot be replaced, or "
        "sparkdl not installed on the executors",
    )
