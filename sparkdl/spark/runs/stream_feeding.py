"""Functions on ranks that a stream feeds, and its micro-batches on their way to them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.data.feed import Uneven, equal_rows
from sparkdl.errors import SparkDLError, TransportError, WaitTimeoutError
from sparkdl.failures import RankFailure, is_secondary
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.stream_feed import Offer, StreamStore, send_rows
from sparkdl.launch.task import RaisingTask, RankContext, Result, of_kind
from sparkdl.spark.runs.launcher import SparkLauncher

if TYPE_CHECKING:
    from sparkdl.coordinator.group import Store
    from sparkdl.launch.function import Returned
    from sparkdl.spark.runs.function_stage import StageWatcher

T = TypeVar("T")
_LOOK_S = 0.1
_CAUSE_S = 15.0
"""Seconds to wait for the end of a rank that rows cannot be sent to: it says why."""
_COMMIT_S = 10.0
"""Longest wait for Spark to write down a micro-batch that was taken, before it is stopped."""
_CANCEL_S = 60.0
"""Longest wait for ranks that were given up."""


@dataclass(frozen=True)
class SendTask(RaisingTask):
    """Sends rows; see :class:`sparkdl.launch.task.Task`.

    Args:
        number: Number of the offer that the rows will be.
        columns: Names of the columns, in the order in which they travel.
    """

    number: int
    columns: tuple[str, ...]
    addresses: Mapping[int, tuple[str, int]]
    token: str = field(repr=False)
    fingerprint: str = ""

    @property
    def devices(self) -> DeviceRequest:
        return DeviceRequest(None, unscheduled=True)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Sends the rows; the result ``sent`` has the attempt and their number."""
        names = list(self.columns)
        named = (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)
        rows = send_rows(
            named, self.addresses[rank.rank], self.token, self.fingerprint,
            number=self.number, attempt=rank.attempt,
        )  # fmt: skip
        yield from Result(rank.rank, "sent", f"{rank.attempt} {rows}").batches()


class StreamEnded(Exception):
    """Ends a query at a micro-batch that was not taken: Spark gives it again after a restart."""


@dataclass(frozen=True)
class Destination:
    """The ranks that the rows go to.

    Args:
        columns: Names of the columns, in the order in which they travel.
        uneven: What happens to ranks that have different numbers of rows.
    """

    count: int
    columns: tuple[str, ...]
    token: str = field(repr=False)
    uneven: Uneven
    start_timeout_s: float


class BatchFeeder:
    """Gives each micro-batch to the ranks, and returns when their functions have taken its rows.

    Args:
        run_ended: Whether the ranks have ended; raises why, if they failed.
    """

    def __init__(self, to: Destination, store: StreamStore, run_ended: Callable[[], bool]) -> None:
        self._to, self._store, self._run_ended = to, store, run_ended
        self._driver: DriverClient | None = None
        self._fingerprint = ""
        self._number = 0
        self.batches_done = 0
        """Micro-batches that were taken."""
        self.error: BaseException | None = None
        """The error that ended the query here."""
        self.cut = False
        """Whether it was ended on purpose, at a micro-batch that was not taken."""
        self.active = threading.Event()
        """Set while a micro-batch is under way."""
        self.ending = threading.Event()
        """Set when no further micro-batch shall begin."""
        self.abandoned = threading.Event()
        """Set when the one under way shall not be waited for."""

    def begun(self, driver: DriverClient, fingerprint: str) -> None:
        """The ranks can be told from now on; they have this certificate."""
        self._driver, self._fingerprint = driver, fingerprint

    def end(self) -> bool:
        """Tells the ranks that there are no more rows; False if they cannot be told yet."""
        if self._driver is not None:
            self._driver.request(self._store.offer(None))
        return self._driver is not None

    def __call__(self, frame: Any, batch_id: int) -> None:
        """The function that Spark calls, one micro-batch after the other.

        Raises:
            StreamEnded: The stream ends, and rows of this micro-batch were not taken.
            SparkDLError: The ranks failed, or cannot be reached.
        """
        self.active.set()
        try:
            if self.ending.is_set():
                raise StreamEnded("the stream was stopped before this micro-batch")
            self._feed(frame, batch_id)
        except StreamEnded:
            self.cut = True
            raise
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.active.clear()

    def _feed(self, frame: Any, batch_id: int) -> None:
        self._meet()
        number, self._number = self._number, self._number + 1
        with self._causes():
            rows, attempts = self._send(frame, number)
        if self._store.left:
            raise StreamEnded("a function takes no more rows")
        if rows:
            counts = [rows.get(rank, 0) for rank in range(self._to.count)]
            given = dict(enumerate(equal_rows(counts, self._to.uneven)))
            self._offer(Offer(number, batch_id, given, attempts))
        self.batches_done += 1

    @contextlib.contextmanager
    def _causes(self) -> Iterator[None]:
        """Within, a rank that cannot be reached raises why it has ended."""
        try:
            yield
        except (SparkDLError, RankFailure) as error:
            deadline = time.monotonic() + _CAUSE_S
            while is_secondary(error) and time.monotonic() < deadline:
                self._check()
                time.sleep(_LOOK_S)
            if isinstance(error, RankFailure):
                raise error.failure.library_error() from None
            raise

    def _meet(self) -> None:
        store, deadline = self._store, time.monotonic() + self._to.start_timeout_s
        while not (self._driver and store.wait_for(self._all_listen, _LOOK_S)):
            self._check()
            if not self._driver:
                time.sleep(_LOOK_S)
            if time.monotonic() > deadline:
                there = store.addresses if self._driver else {}
                names = ", ".join(str(r) for r in range(self._to.count) if r not in there)
                raise WaitTimeoutError(
                    "not all ranks of a stream have started",
                    expected=f"all {self._to.count} within {self._to.start_timeout_s:g} s",
                    received=f"nothing from ranks {names}",
                    hint="look at their executors' logs; do other jobs hold the slots?",
                )

    def _all_listen(self) -> bool:
        return len(self._store.addresses) == self._to.count

    def _send(self, frame: Any, number: int) -> tuple[dict[int, int], dict[int, int]]:
        """Sends the rows by a job; rank -> rows, and rank -> attempt that sent them."""
        to = self._to
        task = SendTask(
            number, to.columns, dict(self._store.addresses), to.token, self._fingerprint
        )
        launcher = SparkLauncher(
            frame.repartition(to.count), to.count, barrier=False,
            description="sparkdl: rows of a stream", noun="stage that sends rows to the ranks",
        )  # fmt: skip
        with launcher.launch(task) as sending:
            while not sending.wait(_LOOK_S):
                self._check()
            sent = of_kind(sending.results(), "sent")
        told = {rank: [int(n) for n in result.text.split()] for rank, result in sent.items()}
        return (
            {rank: rows for rank, (_, rows) in told.items() if rows},
            {rank: attempt for rank, (attempt, _) in told.items()},
        )

    def _offer(self, offer: Offer) -> None:
        """Offers the rows, and waits until they are taken."""
        store, ranks = self._store, range(self._to.count)
        assert self._driver is not None
        with self._causes():
            self._driver.request(store.offer(offer))

        def waiting() -> set[int]:
            return {rank for rank in ranks if store.taken.get(rank, -1) < offer.number}

        while not store.wait_for(lambda: waiting() <= store.left, _LOOK_S):
            self._check()
        if waiting():
            raise StreamEnded("a function takes no more rows, and some were left")

    def _check(self) -> None:
        """Raises if this micro-batch cannot be taken any more."""
        if self._run_ended() or self.abandoned.is_set():
            raise StreamEnded("the ranks have ended")
        if self._store.began_again:
            names = ", ".join(str(rank) for rank in sorted(self._store.began_again))
            raise TransportError(
                f"ranks {names} have begun again, and lost the rows of the stream that they had",
                expected="ranks that live as long as the stream",
                received="a stage that Spark ran again, after it had lost an executor",
                hint="call run again with the same checkpoint_dir: what was not taken comes again",
            )


class StreamingRun(Generic[T]):
    """Functions that a stream feeds; what :func:`sparkdl.run` returns for a streaming DataFrame.

    Args:
        run_stage: Runs the stage of the ranks to its end.
        to: Where the rows go.
        stream: The streaming DataFrame, with the names that columns travel by.
        checkpoint_dir: Folder for Spark's place in the stream; None: each run begins anew.
        trigger: Arguments of Spark's ``DataStreamWriter.trigger``; None: as fast as it goes.
        ranks: How many there are, with those that get no rows.
    """

    def __init__(
        self,
        run_stage: Callable[[StageWatcher], Returned],
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
            self._returned = self._run_stage(self)
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
