"""How many tasks can run at the same time, who may take all of their slots; one Spark job.

Two fits whose workers train in step can each get half of the slots and wait for the other half. So
such a fit, or ``run``, first takes all of its slots from the one :class:`SlotPool` of its
application, in order of asking.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ResourceError
from sparkdl.launch import interrupts
from sparkdl.process.user_warnings import warn_user
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.spark_errors import barrier_refused

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession


ARROW_BATCH_BYTES = 4 << 20
"""Rows go from Spark to Python in Arrow batches of about this size: those of Spark's default
(10,000 rows, 64 MiB) fall out of the processor's caches on both sides and cost twice the time."""


def tag_jobs(spark: SparkSession, tag: str) -> None:
    """Tags the jobs that this thread, or a :class:`SparkJob` that it makes, starts from now on."""
    if is_connect(spark):
        spark.addTag(tag)
    else:
        spark.sparkContext.addJobTag(tag)


def cancel_tagged(spark: SparkSession, tag: str) -> None:
    """Ends the jobs that have the tag; those that start later are not."""
    with interrupts.held():
        if is_connect(spark):
            spark.interruptTag(tag)
        else:
            spark.sparkContext.cancelJobsWithTag(tag)


class SparkJob:
    """One Spark job run in a thread, so that the driver can watch, stop or fail it.

    Nothing runs before :meth:`start`, so that a ``try`` around it, with :meth:`cancel` in its
    ``finally``, holds whenever an interrupt comes.

    Args:
        action: Runs the job and returns its result.
    """

    def __init__(self, spark: SparkSession, action: Callable[[], Any], description: str) -> None:
        self._spark, self._action, self._description = spark, action, description
        self._group = f"sparkdl-{uuid.uuid4().hex[:12]}"
        self._tags = spark.getTags() if is_connect(spark) else set()  # classic threads inherit them
        self.result: Any = None
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._begun = self._abandoned = False
        # Not the thread's own state: an interrupted join() takes a running thread for ended.
        self._ended = threading.Event()

    def start(self) -> None:
        from pyspark import InheritableThread

        kind = threading.Thread if is_connect(self._spark) else InheritableThread
        kind(target=self._run, name=self._group, daemon=True).start()

    def _run(self) -> None:
        with self._lock:
            if self._abandoned:
                return
            self._begun = True
        try:
            if is_connect(self._spark):
                for tag in (self._group, *self._tags):
                    self._spark.addTag(tag)
            else:
                self._spark.sparkContext.setJobGroup(
                    self._group, self._description, interruptOnCancel=True
                )
                # For this thread's job alone; what the user set in the session goes before it.
                self._spark.sparkContext.setLocalProperty(
                    "spark.sql.execution.arrow.maxBytesPerBatch", str(ARROW_BATCH_BYTES)
                )
            self.result = self._action()
        except BaseException as error:  # handed to the driver's thread
            self.error = error
        finally:
            self._ended.set()

    @property
    def running(self) -> bool:
        return self._begun and not self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; False if it still runs."""
        return self._ended.wait(timeout_s)

    def cancel(self, timeout_s: float = 20.0) -> None:
        """Cancels the job and waits until its thread has ended; warns if it has not by then."""
        with self._lock:
            self._abandoned = True
        deadline = time.monotonic() + timeout_s
        while self.running and time.monotonic() < deadline:
            # Again and again: Spark forgets a cancellation that comes before its job.
            with contextlib.suppress(Exception):
                if is_connect(self._spark):
                    self._spark.interruptTag(self._group)
                else:
                    self._spark.sparkContext.cancelJobGroup(self._group)
            self.wait(min(0.5, timeout_s))
        if self.running:
            warn_user(
                f"Spark has not ended the job {self._description!r} within {timeout_s:g} s of its "
                "cancellation; its tasks may still hold their cores"
            )


def count_slots(spark: SparkSession, profile: ResourceProfile | None = None) -> int | None:
    """Tasks that can run at the same time now, or None where it cannot be known (Connect).

    Args:
        profile: What each task asks for, as Spark knows it already; None for the application's.
    """
    if is_connect(spark):
        return None
    context = spark.sparkContext
    try:
        with interrupts.held():  # one inside a call of the JVM leaves its connection broken
            jvm = context._jsc.sc()
            asked = (
                jvm.resourceProfileManager().defaultResourceProfile()
                if profile is None
                else profile._java_resource_profile
            )
            return int(jvm.maxNumConcurrentTasks(asked))
    except Exception:
        return max(1, int(context.defaultParallelism / task_cpus(spark, profile)))


def task_cpus(spark: SparkSession, profile: ResourceProfile | None = None) -> float:
    """Cores that each task takes, by its profile or by the application's settings."""
    if profile is not None and "cpus" in profile.taskResources:
        return float(profile.taskResources["cpus"].amount)
    if is_connect(spark):
        return float(spark.conf.get("spark.task.cpus", "1") or "1")
    return float(spark.sparkContext.getConf().get("spark.task.cpus", "1"))


def wait_for_slots(
    spark: SparkSession,
    wanted: int,
    timeout_s: float = 15.0,
    profile: ResourceProfile | None = None,
) -> int | None:
    """:func:`count_slots`, after waiting for executors that are still starting.

    A local master starts none later, and what ``local-cluster[2,1,1024]`` can start is written in
    it: there nobody waits for more.
    """
    slots = count_slots(spark, profile)
    if slots is None or slots >= wanted:
        return slots
    master = str(spark.sparkContext.master)
    most = _local_slots(master, task_cpus(spark, profile))
    if re.fullmatch(r"local(\[.*)?", master):
        return slots
    wanted = wanted if most is None else min(wanted, most)
    deadline = time.monotonic() + timeout_s
    while slots is not None and slots < wanted and time.monotonic() < deadline:
        time.sleep(0.2)
        slots = count_slots(spark, profile)
    return slots


def slots_to_come(
    spark: SparkSession, wanted: int, profile: ResourceProfile | None = None
) -> int | None:
    """Tasks that can run at the same time when all executors have started; None if unknown.

    Executors that are still starting count, as far as the settings say how many are asked for.

    Args:
        wanted: No more than these are of interest.
        profile: See :func:`count_slots`.
    """
    slots = count_slots(spark, profile)
    if slots is None or slots >= wanted:
        return slots
    context = spark.sparkContext
    master, cpus = str(context.master), task_cpus(spark, profile)
    if master.startswith("local"):
        return _local_slots(master, cpus) or slots
    settings = context.getConf()
    dynamic = _is_dynamic(spark)
    name = "spark.dynamicAllocation.maxExecutors" if dynamic else "spark.executor.instances"
    asked = settings.get(name)
    if asked is None:
        return None if dynamic else _settled_slots(spark, slots, profile)
    started = len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1
    each = (
        slots // started if started else int(int(settings.get("spark.executor.cores", "1")) / cpus)
    )
    return max(slots, int(asked) * each)


def default_parallelism(spark: SparkSession, profile: ResourceProfile | None = None) -> int:
    """Cores that Spark was given by those of a task: the workers if the user names no number."""
    if is_connect(spark):
        cores = _range_partitions(spark)
    else:
        _wait_for_executors(spark)
        cores = int(spark.sparkContext.defaultParallelism)
    return max(1, int(cores / task_cpus(spark, profile)))


def count_partitions(frame: DataFrame) -> int:
    """Partitions of a DataFrame. On Spark Connect a job counts them, empty ones too."""
    if not is_connect(frame.sparkSession):
        return int(frame.rdd.getNumPartitions())

    def one_row(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow

        for _ in batches:  # a worker that leaves rows unread cannot be used again
            pass
        yield pyarrow.RecordBatch.from_pydict({"one": pyarrow.array([1], pyarrow.int32())})

    from pyspark.sql import functions

    rows = frame.select(functions.lit(1).alias("one"))
    return int(rows.mapInArrow(one_row, "one int").count())


def check_barrier(
    spark: SparkSession,
    num_workers: int,
    timeout_s: float = 15.0,
    profile: ResourceProfile | None = None,
) -> None:
    """Returns if a barrier stage of this many tasks can run here; no job is started.

    Waits up to ``timeout_s`` for executors that are still starting. Where slots cannot be counted
    (Spark Connect to a cluster), only Spark itself can refuse; see :func:`barrier_refusal`.

    Raises:
        ResourceError: Fewer slots than workers, or dynamic allocation is on (SPARK-24942).
    """
    master = str(spark.conf.get("spark.master", "") or "")
    if _is_dynamic(spark) and not (master == "local" or master.startswith("local[")):
        raise _dynamic("spark.dynamicAllocation.enabled=true")
    slots = wait_for_slots(spark, num_workers, timeout_s, profile)
    if slots is None:
        slots = _local_slots(master, task_cpus(spark, profile))
    if slots is not None and slots < num_workers:
        raise _too_few_slots(num_workers, f"{slots} slots")


def _dynamic(received: str) -> ResourceError:
    return ResourceError(
        "a barrier stage cannot run under dynamic allocation",
        expected="spark.dynamicAllocation.enabled=false (SPARK-24942)", received=received,
        hint="switch it off for this application; SparkModel's modes with a server run with it",
    )  # fmt: skip


class PartitionsError(ResourceError):
    """Spark runs no barrier stage on the partitions of these rows; no task has begun."""


def barrier_refusal(error: BaseException, num_workers: int) -> ResourceError | None:
    """Spark's own refusal of a barrier stage as our error; None if ``error`` is something else."""
    refused = barrier_refused(error)
    if refused == "slots":
        return _too_few_slots(num_workers, "fewer slots")
    if refused == "dynamic allocation":
        return _dynamic("Spark refused the stage")
    if refused == "partitions":
        return PartitionsError(
            "a barrier stage cannot read the partitions of this DataFrame as they are",
            expected="partitions that each come from one partition before it (SPARK-24820)",
            received="a frame made by union, coalesce, limit or another step that joins or leaves "
            "out partitions",
            hint="repartition=True (the default), or data.repartition(num_workers) before the fit",
        )
    return None


def _too_few_slots(num_workers: int, received: str) -> ResourceError:
    return ResourceError(
        f"{num_workers} workers must run at the same time, and Spark has no room for them",
        expected=f"at least {num_workers} slots (cores of all executors / spark.task.cpus, "
        "and GPUs where tasks ask for them)",
        received=received, hint="fewer workers (num_workers, np), or more or larger executors",
    )  # fmt: skip


def _wait_for_executors(spark: SparkSession) -> None:
    """Waits for the executors of a session that has just begun: Spark counts two cores until then.

    YARN and Kubernetes wait by themselves, a standalone master does not: there the first may take
    some seconds, and each other comes within one.
    """
    if str(spark.sparkContext.master).startswith("local"):
        wait_for_slots(spark, sys.maxsize)  # what the master can start is written in it
    elif not _is_dynamic(spark) and count_slots(spark) == 0:
        _settled_slots(spark, wait_for_slots(spark, 1) or 0)


def _settled_slots(spark: SparkSession, slots: int, profile: ResourceProfile | None = None) -> int:
    """The slots when none has come for a second; ``slots`` are there now."""
    before = 0
    while slots > before:
        before, slots = slots, wait_for_slots(spark, slots + 1, 1.0, profile) or 0
    return slots


def _local_slots(master: str, cpus: float) -> int | None:
    """Slots of ``local[2]`` and ``local-cluster[2,1,1024]``, as written; None for any other."""
    found = re.fullmatch(r"local(?:-cluster)?\[\s*(\d+)\s*(?:,\s*(\d+)\s*)?(?:,.*)?\]", master)
    if found is None:
        return 1 if master == "local" else None
    if master.startswith("local-cluster"):
        return int(found[1]) * int(int(found[2] or 1) / cpus)
    return int(int(found[1]) / cpus)


def _is_dynamic(spark: SparkSession) -> bool:
    return str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"


def _range_partitions(spark: SparkSession) -> int:
    """Into how many parts Spark cuts a range by itself: one for each core (a small job)."""
    from pyspark.sql import functions

    spark.range(1).count()  # executors register when there is something to do
    parts = spark.range(1 << 16).select(functions.spark_partition_id().alias("part"))
    return 1 + int(parts.agg(functions.max("part")).collect()[0][0])


LOOK_S = 0.2


@dataclass(eq=False)
class _Claim:
    """One fit's or run's wish for slots."""

    name: str
    slots: int
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.name} ({self.slots} slots, {time.monotonic() - self.since:.0f} s ago)"


class SlotPool:
    """Thread-safe. Who asks first is served first, also if a later one would fit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Claim] = []
        self._held: list[_Claim] = []

    @contextlib.contextmanager
    def take(self, slots: int, capacity: int, name: str, timeout_s: float) -> Iterator[None]:
        """Holds slots during its body; waits for them first.

        Args:
            slots: How many; all of them if there are fewer.
            capacity: Slots of the application now.
            name: Who takes them, for the errors of others.
            timeout_s: Longest wait.

        Raises:
            ResourceError: Others held them for too long, or this thread holds some itself; they
                are named.
        """
        claim = _Claim(name, min(slots, capacity))
        with self._changed:
            self._waiting.append(claim)
            try:
                self._wait(claim, capacity, timeout_s)
            finally:
                self._waiting.remove(claim)
                self._changed.notify_all()
            self._held.append(claim)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(claim)
                self._changed.notify_all()

    def _wait(self, claim: _Claim, capacity: int, timeout_s: float) -> None:
        deadline = claim.since + timeout_s
        while not self._fits(claim, capacity):
            inside = [held for held in self._held if held.thread == claim.thread]
            if inside or time.monotonic() > deadline:
                raise ResourceError(
                    f"{claim.name} has no slots for its {claim.slots} workers",
                    expected=f"{claim.slots} of {capacity} slots free within {timeout_s:g} s",
                    received="held by " + ", ".join(map(str, self._held)),
                    hint="a fit inside another one's callback waits for itself"
                    if inside
                    else "wait for the other to end, give each fewer workers, or raise "
                    "Limits(start_timeout_s=...)",
                )
            self._changed.wait(LOOK_S)

    def _fits(self, claim: _Claim, capacity: int) -> bool:
        free = capacity - sum(held.slots for held in self._held)
        return self._waiting[0] is claim and (claim.slots <= free or not self._held)


_pools: dict[str, SlotPool] = {}


def slot_pool(spark: SparkSession) -> SlotPool:
    """The pool of a session's application."""
    with interrupts.held():  # one inside a call of the JVM leaves its connection broken
        name = "connect" if is_connect(spark) else str(spark.sparkContext.applicationId)
    return _pools.setdefault(name, SlotPool())
