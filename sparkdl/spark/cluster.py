"""Slots, addresses and stages: what the driver asks of the cluster."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from typing import Any

from sparkdl.errors import ResourceError


def is_connect(spark: Any) -> bool:
    """Whether the session is a Spark Connect client (no SparkContext, no RDD)."""
    return "connect" in type(spark).__module__


def session_of(data: Any = None) -> Any:
    """The session of a DataFrame or RDD, or the active one.

    Raises:
        ResourceError: There is no session.
    """
    from pyspark.sql import SparkSession

    session = getattr(data, "sparkSession", None) or SparkSession.getActiveSession()
    if session is None:
        raise ResourceError(
            "no Spark session is running",
            expected="an active SparkSession",
            received="none",
            hint="spark = SparkSession.builder.getOrCreate()",
        )
    return session


def count_slots(spark: Any) -> int | None:
    """Tasks that can run at the same time now, or None where it cannot be known (Connect)."""
    if is_connect(spark):
        return None
    context = spark.sparkContext
    try:
        jvm = context._jsc.sc()
        profile = jvm.resourceProfileManager().defaultResourceProfile()
        return int(jvm.maxNumConcurrentTasks(profile))
    except Exception:
        cpus = int(context.getConf().get("spark.task.cpus", "1"))
        return max(1, int(context.defaultParallelism) // cpus)


def wait_for_slots(spark: Any, wanted: int, timeout_s: float = 15.0) -> int | None:
    """:func:`count_slots`, after waiting for executors that are still starting."""
    import time

    deadline = time.monotonic() + timeout_s
    slots = count_slots(spark)
    while slots is not None and slots < wanted and time.monotonic() < deadline:
        time.sleep(0.2)
        slots = count_slots(spark)
    return slots


def default_parallelism(spark: Any) -> int:
    """Cores that Spark was given, the number of workers if the user names none."""
    if is_connect(spark):
        return 2
    context = spark.sparkContext
    cpus = int(context.getConf().get("spark.task.cpus", "1"))
    return max(1, int(context.defaultParallelism) // cpus)


def is_local(spark: Any) -> bool:
    """Whether all executors are on this machine (``local[…]``, ``local-cluster[…]``)."""
    if is_connect(spark):
        return False
    return str(spark.sparkContext.master).startswith("local")


def driver_address(spark: Any) -> tuple[str, str]:
    """``(bind, advertised)`` addresses for a server on the driver: the narrowest that works."""
    if is_local(spark):
        return "127.0.0.1", "127.0.0.1"
    host = str(spark.conf.get("spark.driver.host", "127.0.0.1"))
    bind = str(spark.conf.get("spark.driver.bindAddress", host))
    return bind, host


class Stage:
    """One Spark job run in a thread, so that the driver can watch, stop or fail it.

    Args:
        spark: The session.
        action: Runs the job and returns its result.
        description: Shown in Spark's UI.
    """

    def __init__(self, spark: Any, action: Callable[[], Any], description: str) -> None:
        from pyspark import InheritableThread

        self._spark, self._action, self._description = spark, action, description
        self._group = f"sparkdl-{uuid.uuid4().hex[:12]}"
        self.result: Any = None
        self.error: BaseException | None = None
        if is_connect(spark):
            self._thread = threading.Thread(target=self._run, daemon=True)
        else:
            self._thread = InheritableThread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if is_connect(self._spark):
                self._spark.addTag(self._group)
            else:
                self._spark.sparkContext.setJobGroup(
                    self._group, self._description, interruptOnCancel=True
                )
            self.result = self._action()
        except BaseException as error:  # handed to the driver's thread
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; False if it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def cancel(self, timeout_s: float = 20.0) -> None:
        """Cancels the job and waits until its thread has ended."""
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                if is_connect(self._spark):
                    self._spark.interruptTag(self._group)
                else:
                    self._spark.sparkContext.cancelJobGroup(self._group)
            self._thread.join(timeout_s)
