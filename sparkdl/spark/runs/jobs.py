"""Spark jobs that the driver watches, tags and cancels."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from sparkdl.launch import interrupts
from sparkdl.process.user_warnings import warn_user
from sparkdl.spark.session.running import is_connect

ARROW_BATCH_BYTES = 4 << 20
"""Rows go from Spark to Python in Arrow batches of about this size: those of Spark's default
(10,000 rows, 64 MiB) fall out of the processor's caches on both sides and cost twice the time."""


def tag_jobs(spark: Any, tag: str) -> None:
    """Tags the jobs that this thread, or a :class:`SparkJob` that it makes, starts from now on."""
    if is_connect(spark):
        spark.addTag(tag)
    else:
        spark.sparkContext.addJobTag(tag)


def cancel_tagged(spark: Any, tag: str) -> None:
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
        spark: The session.
        action: Runs the job and returns its result.
        description: Shown in Spark's UI.
    """

    def __init__(self, spark: Any, action: Callable[[], Any], description: str) -> None:
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
        """Begins the job."""
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
