"""Ranks as threads of this process; a call in a thread that its caller may give up."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pyarrow as pa

from sparkdl.failures import SECONDARY_DELAY_S, Failure, RankFailure, root_cause
from sparkdl.launch.task import Gathering, Meeting, RankContext, Result, Task, join_batches
from sparkdl.process.closing import Closing
from sparkdl.process.log_lines import show

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
RunRank = Callable[[RankContext], Iterator[pa.RecordBatch]]


class RestartedRanks:
    """Runs ranks, and again when they fail, as often as each may.

    Ranks that may be started again meet once: a later attempt is told what the first was told.
    Before each of them is a pause, twice as long each time, for what a rank needs and does not find
    yet.
    """

    def __init__(
        self, restarts: Sequence[int], run: RunRank, ended: threading.Event | None = None
    ) -> None:
        self._restarts, self._run = tuple(restarts), run
        self._ended = ended or threading.Event()

    def run(self, rank: RankContext) -> Iterator[pa.RecordBatch]:
        """All attempts of a rank; what the last one yielded."""
        allowed = self._restarts[rank.rank] if rank.rank < len(self._restarts) else 0
        if allowed and rank.gathering is not None:
            rank = replace(rank, gathering=_KeptGathering(rank.gathering))
        for attempt in range(allowed):
            try:
                batches = list(self._run(replace(rank, attempt=attempt)))
            except (Exception, SystemExit) as error:
                if self._ended.is_set():
                    raise
                told = Failure.of(rank.rank, error).error
                line = f"is started again ({attempt + 1} of {allowed}) after: {told}"
                show(rank.rank, line) if rank.log is None else rank.log(line)
                # 2**attempt has too many digits for a float after some thousand restarts
                if self._ended.wait(min(FIRST_PAUSE_S * 2 ** min(attempt, 10), LONGEST_PAUSE_S)):
                    raise
            else:
                yield from batches
                return
        yield from self._run(replace(rank, attempt=allowed))


class _KeptGathering:
    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._told: list[str] | None = None

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        if self._told is None:
            self._told = self._gathering.all_gather(text, timeout_s)
        return self._told

    def settle(self) -> None:
        self._gathering.settle()


class ThreadLauncher:
    """Starts ranks as threads: for tests, and for tasks that release Python's lock.

    A thread cannot be ended: leaving the launch waits until all ranks have ended by themselves.
    Those that exchange texts are told when another rank has failed.
    """

    def __init__(self, num_ranks: int, restarts: Sequence[int] = ()) -> None:
        self._num_ranks, self._restarts = num_ranks, restarts

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[LocalRanks]:
        def run(rank: RankContext) -> Iterator[pa.RecordBatch]:
            try:
                yield from task.run(rank, iter(()))
            except (Exception, SystemExit) as error:
                yield from task.failed(rank, error)

        ended = threading.Event()
        restarted = RestartedRanks(self._restarts, run, ended)
        with LocalRanks(self._num_ranks, restarted.run, ended.set) as ranks:
            yield ranks


class LocalRanks(Closing):
    """Ranks that a thread each runs."""

    def __init__(self, num_ranks: int, run: RunRank, end: Callable[[], None] | None = None) -> None:
        self._run, self._end = run, end
        self._meeting = Meeting(num_ranks)
        self._batches: dict[int, list[pa.RecordBatch]] = {}
        self._failures: list[Failure] = []
        self._failed_at = 0.0
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._follow, args=(r,), name=f"sparkdl-rank{r}", daemon=True)
            for r in range(num_ranks)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, number: int) -> None:
        rank = RankContext(
            number,
            num_ranks=len(self._threads),
            gathering=self._meeting.gathering(number),
            log=lambda line: show(number, line),
        )
        try:
            batches = list(self._run(rank))
        except BaseException as error:
            failure = Failure.of(number, error)
            with self._changed:
                self._failures.append(failure)
                self._failed_at = self._failed_at or time.monotonic()
                self._changed.notify_all()
            self._meeting.end()
        else:
            with self._changed:
                self._batches[number] = batches
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until all have ended, or one has failed and the first cause is known."""
        with self._changed:
            return self._changed.wait_for(self._over, timeout_s)

    def _over(self) -> bool:
        if len(self._batches) + len(self._failures) == len(self._threads):
            return True
        if not self._failures:
            return False
        late = time.monotonic() - self._failed_at > SECONDARY_DELAY_S
        return late or not all(failure.secondary for failure in self._failures)

    def results(self) -> list[Result]:
        if self._meeting.timeout is not None:
            raise self._meeting.timeout
        cause = root_cause(self._failures)
        if cause is not None:
            raise RankFailure(cause)
        return self.results_so_far()

    def results_so_far(self) -> list[Result]:
        with self._changed:
            ended = dict(self._batches)
        return join_batches(b for number in sorted(ended) for b in ended[number])

    def close(self) -> None:
        self._meeting.end()
        if self._end is not None:
            self._end()
        for thread in self._threads:
            thread.join()


class ThreadCall:
    """Calls a function in a daemon thread; one that is given up is left behind."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.outcome: Future[Any] = Future()
        """What it returns or raises."""
        self._thread = threading.Thread(target=self._call, args=(function,), name=name, daemon=True)
        self._thread.start()

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            self.outcome.set_result(function())
        except BaseException as error:
            self.outcome.set_exception(error)

    def stack(self) -> str:
        """The lines at which the function stands, the innermost last."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-8:])
