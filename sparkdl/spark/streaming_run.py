"""``StreamingRun``: functions on ranks that a stream feeds, for as long as it runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.coordinator.group import Store
from sparkdl.errors import SparkDLError, WaitTimeoutError
from sparkdl.launch.feeds.stream_feed import StreamStore
from sparkdl.launch.function import Returned
from sparkdl.spark.runs.function_stage import StageWatcher
from sparkdl.spark.runs.stream_feeding import BatchFeeder, Destination

T = TypeVar("T")
_LOOK_S = 0.1
_COMMIT_S = 10.0
"""Longest wait for Spark to write down a micro-batch that was taken, before it is stopped."""
_CANCEL_S = 60.0
"""Longest wait for ranks that were given up."""


class RunStage(Protocol):
    """Runs the stage of the ranks to its end."""

    def __call__(self, *, watcher: StageWatcher) -> Returned: ...


class StreamingRun(Generic[T]):
    """Functions that a stream feeds; what :func:`sparkdl.run` returns for a streaming DataFrame.

    Args:
        to: Where the rows go.
        stream: The streaming DataFrame, with the names that columns travel by.
        checkpoint_dir: Folder for Spark's place in the stream; None: each run begins anew.
        trigger: Arguments of Spark's ``DataStreamWriter.trigger``; None: as fast as it goes.
        ranks: How many there are, with those that get no rows.
    """

    def __init__(
        self,
        run_stage: RunStage,
        to: Destination,
        stream: Any,
        checkpoint_dir: str | None,
        trigger: Mapping[str, Any] | None,
        ranks: int,
    ) -> None:
        self._run_stage, self._ranks_in_all = run_stage, ranks
        self._store = StreamStore()
        self._feeder = BatchFeeder(to, self._store, self._run_ended)
        self._returned: Returned | None = None
        self._run_error: BaseException | None = None
        self._error: BaseException | None = None
        self._ranks_ended, self._finished = threading.Event(), threading.Event()
        self._give_up_at: float | None = None
        self._ranks = threading.Thread(target=self._run, name="sparkdl-stream-ranks", daemon=True)
        self._ranks.start()
        try:
            writer = stream.writeStream.foreachBatch(self._feeder)
            if checkpoint_dir is not None:
                writer = writer.option("checkpointLocation", checkpoint_dir)
            if trigger is not None:
                writer = writer.trigger(**trigger)
            self.query = writer.start()
            """Spark's query: its progress, its name."""
        except BaseException:
            self._give_up_at = time.monotonic()
            self._ranks_ended.wait(_CANCEL_S)
            raise
        self._keeper = threading.Thread(target=self._keep, name="sparkdl-stream", daemon=True)
        self._keeper.start()

    @property
    def is_active(self) -> bool:
        """Whether the functions still run."""
        return not self._finished.is_set()

    @property
    def batches_done(self) -> int:
        """Micro-batches that the functions have taken in this run."""
        return self._feeder.batches_done

    @property
    def exception(self) -> BaseException | None:
        """The error that ended the run; None if it runs, or ended as it should."""
        return self._error

    @property
    def results(self) -> list[T]:
        """The results of the function on each rank, in rank order.

        Raises:
            WaitTimeoutError: The functions still run.
            Exception: What ended the run.
        """
        if not self._finished.is_set():
            raise WaitTimeoutError(
                "the functions that a stream feeds have not returned yet",
                expected="the end of the stream",
                received=f"a stream that runs; {self.batches_done} micro-batches were taken",
                hint="stop() ends it, await_termination() waits for its end",
            )
        if self._error is not None:
            raise self._error
        assert self._returned is not None
        return [self._returned.load(rank) for rank in range(self._ranks_in_all)]

    def stop(self, timeout_s: float = 600.0) -> None:
        """Ends the stream and waits until the functions have returned.

        The micro-batch that is under way is taken to its end first. Then the feeds have no more
        rows.

        Args:
            timeout_s: The time after which the micro-batch under way, and functions that have not
                returned, are given up. What was not taken comes again after a restart.

        Raises:
            WaitTimeoutError: Functions have not returned in time; their ranks were ended.
            Exception: What ended the run before.
        """
        self._feeder.ending.set()
        deadline = time.monotonic() + timeout_s
        if not self._finished.wait(timeout_s):
            self._give_up_at = deadline
            self._feeder.abandoned.set()
            self._finished.wait(_CANCEL_S)
        if self._error is not None:
            raise self._error

    def await_termination(self, timeout_s: float | None = None) -> bool:
        """Waits until the stream has ended and the functions have returned.

        Args:
            timeout_s: The longest wait; None without a limit.

        Returns:
            Whether they have.

        Raises:
            Exception: What ended the run: of a function, with its traceback.
        """
        if not self._finished.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def store(self) -> Store:
        return self._store

    def begun(self, driver: DriverClient, fingerprint: str) -> None:
        self._feeder.begun(driver, fingerprint)

    def check(self) -> None:
        """Ends the ranks where they are given up."""
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            raise WaitTimeoutError(
                "the functions that a stream fed did not return after its end",
                expected="their end within the timeout_s of stop()",
                received="ranks that run; they were ended",
                hint="leave the loop when feed.should_stop(), or raise timeout_s",
            )

    def _run(self) -> None:
        try:
            self._returned = self._run_stage(watcher=self)
        except BaseException as error:
            self._run_error = error
        finally:
            self._ranks_ended.set()

    def _run_ended(self) -> bool:
        """Whether the ranks have ended; raises why, if they failed."""
        if not self._ranks_ended.is_set():
            return False
        if self._run_error is not None:
            raise self._run_error
        return True

    def _keep(self) -> None:
        """Ends the query with the ranks, and the ranks with the query."""
        feeder = self._feeder
        try:
            while self._query_runs():
                if self._ranks_ended.wait(_LOOK_S) or self._store.left:
                    feeder.ending.set()
                if feeder.ending.is_set() and not feeder.active.is_set():
                    self._stop_query()
            feeder.ending.set()
            with contextlib.suppress(SparkDLError):  # ranks that have ended need not be told
                while not (self._ranks_ended.is_set() or feeder.end()):
                    self._ranks_ended.wait(_LOOK_S)
            self._ranks_ended.wait()  # a function may take its time after the last row
            self._error = self._run_error or feeder.error or self._query_error()
        except BaseException as error:
            self._error = error
        finally:
            self._finished.set()

    def _query_runs(self) -> bool:
        with contextlib.suppress(Exception):  # the session was stopped, or its JVM has ended
            return bool(self.query.isActive)
        return False

    def _stop_query(self) -> None:
        """Stops the query after it has written down what was taken."""
        deadline = time.monotonic() + _COMMIT_S
        with contextlib.suppress(Exception):
            while self.query.status["isTriggerActive"] and time.monotonic() < deadline:
                if not self.query.isActive:
                    return
                time.sleep(_LOOK_S / 2)
            self.query.stop()

    def _query_error(self) -> BaseException | None:
        """The error that ended the query, if it was neither its end nor this run's."""
        if self._feeder.cut:
            return None
        try:
            error: BaseException | None = self.query.exception()
        except Exception as gone:
            return gone
        return error
