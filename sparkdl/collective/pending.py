"""An operation that runs in the background, and the text that names the ranks it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sparkdl.errors import WaitTimeoutError

T = TypeVar("T")


class Pending(Generic[T]):
    """An operation that runs in the background, or has ended.

    Any thread may wait for it, any number of times. The caller must not touch the operation's
    arrays until :meth:`wait` has returned.
    """

    def __init__(self, work: Callable[[], T], missing: Callable[[], list[int]], what: str) -> None:
        self._work = work
        self._missing = missing
        self._what = what
        self._done = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self, guard: Callable[[Callable[[], T]], T]) -> None:
        """Does the work under ``guard`` and keeps its result or error; never raises."""
        try:
            self._result.append(guard(self._work))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def done(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> T:
        """The result, once it is there.

        Args:
            timeout_s: How long to wait at most; None: as long as the communicator's own limit.

        Raises:
            WaitTimeoutError: Not done in time; it goes on, and can be waited for again.
            SparkDLError: What the operation itself raised.
        """
        if not self._done.wait(timeout_s):
            missing = self._missing()
            raise WaitTimeoutError(
                f"{self._what} is not done; missing {name_ranks(missing)}",
                expected=f"an end within {timeout_s:g} s",
                received="it still runs",
                hint="wait again, or close the communicator",
            )
        if self._error is not None:
            raise self._error
        return self._result[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks as words for an error message.

    >>> name_ranks([3]), name_ranks([1, 2]), name_ranks([])
    ('rank 3', 'ranks 1, 2', 'no rank')
    """
    if not ranks:
        return "no rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in ranks)
