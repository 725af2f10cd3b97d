"""Micro-batches on their way to the ranks: what Spark calls for each one, on the driver."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.data.feed import Uneven, equal_rows
from sparkdl.errors import SparkDLError, TransportError, WaitTimeoutError
from sparkdl.failures import RankFailure, is_secondary
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.feeds.stream_feed import Offer, StreamStore, send_rows
from sparkdl.launch.task import RaisingTask, RankContext, Result, of_kind
from sparkdl.spark.runs.launcher import SparkLauncher


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


_LOOK_S = 0.1
_CAUSE_S = 15.0
"""Seconds to wait for the end of a rank that rows cannot be sent to: it says why."""


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
