"""Ranks as child processes of this process, on this machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from sparkdl.launch.child import Child
from sparkdl.launch.results import Result
from sparkdl.launch.task import Launcher, RankContext, Ranks, Task
from sparkdl.launch.threads import LocalRanks, RestartedRanks
from sparkdl.process import payload
from sparkdl.process.log_lines import show


class ProcessLauncher:
    """Starts ranks as processes of this machine; what they print is shown here.

    Leaving the launch kills the ranks that still run.

    Args:
        num_ranks: How many.
        restarts: How often each rank may be started again after it failed; none if empty.
        environments: Variables of each rank's process, beside those of this one; none if empty.
        first_rank: The number of the first, if another launcher starts those before it. The ranks
            meet at a coordinator then, not here.
    """

    def __init__(
        self,
        num_ranks: int,
        restarts: Sequence[int] = (),
        environments: Sequence[Mapping[str, str]] = (),
        first_rank: int = 0,
    ) -> None:
        self._num_ranks, self._restarts = num_ranks, restarts
        self._environments = environments or [{}] * num_ranks
        self._first_rank = first_rank

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[LocalRanks]:
        content = payload.dump(task)
        children: list[Child] = []
        lock = threading.Lock()
        ended = threading.Event()

        def run(rank: RankContext) -> Iterator[pa.RecordBatch]:
            environment = self._environments[rank.rank]
            if self._first_rank:
                rank = self._shifted(rank)
            with lock:
                if ended.is_set():
                    return
                child = Child(content, rank, lambda line: show(rank.rank, line), environment)
                children.append(child)
            with child:
                try:
                    yield from child.results(iter(()))
                except (Exception, SystemExit) as error:
                    yield from task.failed(rank, error)

        def end() -> None:
            with lock:
                ended.set()
                for child in children:
                    child.kill()

        restarted = RestartedRanks(self._restarts, run, ended)
        with LocalRanks(self._num_ranks, restarted.run, end) as ranks:
            yield ranks

    def _shifted(self, rank: RankContext) -> RankContext:
        number = self._first_rank + rank.rank
        return replace(
            rank, rank=number, num_ranks=self._first_rank + self._num_ranks,
            gathering=None, log=lambda line: show(number, line),
        )  # fmt: skip


class JoinedLauncher:
    """Starts the ranks of several launchers, which meet at a coordinator."""

    def __init__(self, *launchers: Launcher) -> None:
        self._launchers = launchers

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[JoinedRanks]:
        with contextlib.ExitStack() as stack:
            yield JoinedRanks([stack.enter_context(one.launch(task)) for one in self._launchers])


class JoinedRanks:
    """Ranks of several launches; the first of these that fails ends the wait."""

    def __init__(self, launches: list[Ranks]) -> None:
        self._launches = launches
        self._results: dict[int, list[Result]] = {}
        self._error: Exception | None = None

    def wait(self, timeout_s: float) -> bool:
        for number, launch in enumerate(self._launches):
            if number in self._results or self._error is not None:
                continue
            if launch.wait(timeout_s / len(self._launches)):
                try:
                    self._results[number] = launch.results()
                except Exception as error:
                    self._error = error
        return self._error is not None or len(self._results) == len(self._launches)

    def results(self) -> list[Result]:
        if self._error is not None:
            raise self._error
        return [result for number in sorted(self._results) for result in self._results[number]]

    def results_so_far(self) -> list[Result]:
        return [result for launch in self._launches for result in launch.results_so_far()]
