"""Ranks that two launchers start: tasks of Spark, and processes beside the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sparkdl.launch.results import Result
from sparkdl.launch.task import Launcher, Ranks, Task


class JoinedLauncher:
    """Starts the ranks of several launchers, which meet at a coordinator.

    Args:
        launchers: Each starts ranks with numbers of its own.
    """

    def __init__(self, *launchers: Launcher) -> None:
        self._launchers = launchers

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[JoinedRanks]:
        """Starts the task on every rank; see :class:`sparkdl.launch.task.Launcher`."""
        with contextlib.ExitStack() as stack:
            yield JoinedRanks([stack.enter_context(one.launch(task)) for one in self._launchers])


class JoinedRanks:
    """Ranks of several launches; the first of these that fails ends the wait.

    Args:
        launches: The launches.
    """

    def __init__(self, launches: list[Ranks]) -> None:
        self._launches = launches
        self._results: dict[int, list[Result]] = {}
        self._error: Exception | None = None

    def wait(self, timeout_s: float) -> bool:
        """Waits until all have ended, or one has failed."""
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
        """The results of all ranks; see :class:`sparkdl.launch.task.Ranks`."""
        if self._error is not None:
            raise self._error
        return [result for number in sorted(self._results) for result in self._results[number]]

    def results_so_far(self) -> list[Result]:
        """The results of the ranks that have ended."""
        return [result for launch in self._launches for result in launch.results_so_far()]
