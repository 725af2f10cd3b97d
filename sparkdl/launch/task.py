"""The protocols of a launcher and of the tasks that it starts.

A *task* is made on the driver and pickled. A *launcher* starts it once per *rank*: as threads
(:mod:`sparkdl.launch.threads`), as processes of this machine (:mod:`sparkdl.launch.child`), or
as tasks of a Spark stage (:mod:`sparkdl.spark.runs.launcher`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from sparkdl.errors import ConfigError, SparkDLError, TransportError, WaitTimeoutError
from sparkdl.failures import Failure, RankFailure
from sparkdl.launch.devices import DeviceRequest, Resources
from sparkdl.launch.results import Result, failed
from sparkdl.process.log_lines import Sink


class Gathering(Protocol):
    """A rank's part in the one exchange that the launcher provides."""

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order.

        Raises:
            WaitTimeoutError: Some rank did not come in time.
        """

    def settle(self) -> None:
        """Returns when no rank is inside the exchange any more: from then on one may fail."""


class AloneGathering:
    """The gathering of a world of one."""

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        return [text]

    def settle(self) -> None:
        """At once."""


class Meeting:
    """The meeting where ranks in threads or children of one process exchange texts."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._condition = threading.Condition()
        self._texts: dict[int, str] = {}
        self._told: list[str] = []
        self._round = 0
        self._ended = False
        self.timeout: WaitTimeoutError | None = None
        """The error of the first rank that waited too long."""

    def gathering(self, rank: int) -> Gathering:
        """A rank's part in it."""
        return _MeetingRank(self, rank)

    def end(self) -> None:
        """Ends every wait: a rank has failed."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def all_gather(self, rank: int, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order."""
        with self._condition:
            number = self._round
            self._texts[rank] = text
            if len(self._texts) == self._num_ranks:
                self._told = [self._texts[r] for r in range(self._num_ranks)]
                self._texts = {}
                self._round += 1
                self._condition.notify_all()
                return self._told
            self._condition.wait_for(lambda: self._round > number or self._ended, timeout_s)
            if self._round > number:
                return self._told
            if self._ended:
                raise TransportError(
                    f"another rank has failed; rank {rank} cannot go on",
                    expected="all ranks to take part to the end",
                    received="a launch that has ended",
                )
            missing = [r for r in range(self._num_ranks) if r not in self._texts]
            error = WaitTimeoutError(
                f"{len(missing)} of {self._num_ranks} ranks did not come",
                expected=f"all ranks within {timeout_s:g} s",
                received=f"nothing from ranks {', '.join(map(str, missing))}",
                hint="do they hang while they import a framework or unpickle the function?",
            )
            self.timeout = self.timeout or error
            raise error


class _MeetingRank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        return self._meeting.all_gather(self._rank, text, timeout_s)

    def settle(self) -> None:
        """At once: a failure ends every wait in the meeting."""


GATHER_TIMEOUT_S = 300.0
"""Seconds that a rank waits for the others to come up."""


@dataclass(frozen=True)
class RankContext:
    """Which of the ranks this is, and what its launcher provides.

    Args:
        attempt: A number that no other attempt at the work of this rank has.
        num_ranks: Ranks in all; 0 where only Spark knows (a rank for each partition of a frame).
        gathering: The ranks' exchange of texts; None where they do not run at the same time.
        log: Takes lines for the driver; None where the launcher has no way for them.
    """

    rank: int
    attempt: int = 0
    num_ranks: int = 1
    resources: Resources = field(default_factory=Resources)
    gathering: Gathering | None = None
    log: Sink | None = None

    def all_gather(self, text: str, timeout_s: float = GATHER_TIMEOUT_S) -> list[str]:
        if self.gathering is None:
            raise ConfigError(
                f"rank {self.rank} cannot exchange texts with the others",
                expected="ranks that run at the same time",
                received="a launch whose ranks run as there is room for them",
            )
        return self.gathering.all_gather(text, timeout_s)

    def settle(self) -> None:
        if self.gathering is not None:
            self.gathering.settle()


class Task(Protocol):
    """Picklable work for every rank; made on the driver."""

    @property
    def devices(self) -> DeviceRequest:
        """The devices that it must run on; where this process has others a child is started."""

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The work: the rank's Arrow batches in, Arrow batches out.

        What comes out are :class:`~sparkdl.launch.results.Result` batches, except from a task
        that transforms rows (predict).
        """

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Turns an exception that ended :meth:`run` into batches for the driver, or raises it.

        A raised exception ends the other ranks (of a barrier stage), or makes Spark try again.
        Runs in the process that the launcher started, never in a child.
        """


class RaisingTask:
    """The base of tasks whose exceptions end the whole launch."""

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Raises it: the launcher ends the other ranks, whatever they do, or Spark tries again."""
        raise RankFailure(Failure.of(rank.rank, error)) from error


class ReturningTask:
    """The base of tasks whose exceptions are results: another attempt would find the same."""

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Returns it."""
        yield from failed(rank.rank, Failure.of(rank.rank, error)).batches()


class QueryTask:
    """The base of tasks in a user's query, where Spark shows the text of an exception."""

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Raises it: Spark tries again, and at last shows it to whoever asks for the rows."""
        if isinstance(error, SparkDLError):
            raise error
        raise Failure.of(rank.rank, error).worker_error() from None


class Ranks(Protocol):
    """Ranks that run."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until all have ended; False if some still run."""

    def results(self) -> list[Result]:
        """Their results, after all have ended.

        Raises:
            RankFailure: A rank raised; if several did, the first cause.
            RanksLost: Ranks ended without a description of why.
            ResourceError: They could not start at the same time.
            WaitTimeoutError: Some did not come in time; they are named.
        """

    def results_so_far(self) -> list[Result]:
        """The results of the ranks that have ended; none where the launcher has them at the end."""


class Launcher(Protocol):
    """A way to start ranks."""

    def launch(self, task: Task) -> AbstractContextManager[Ranks]:
        """Starts the task on every rank; leaving the context ends those that still run."""
