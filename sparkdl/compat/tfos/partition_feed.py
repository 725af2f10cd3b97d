"""A function that takes elements and gives results, as an iterator of a partition's results."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

from sparkdl.errors import DataError, WaitTimeoutError
from sparkdl.launch.thread_call import ThreadCall

_END = object()
_LEAVE_S = 5.0


class PartitionFeed:
    """The elements of one partition, for a function that runs in a thread.

    The function asks, and the partition's own thread takes the elements from Spark and passes the
    results on; so no more elements and results are in memory than the function has asked for.

    Args:
        elements: The partition.
        timeout_s: How long the function may do neither: ask, give, end.
    """

    def __init__(self, elements: Iterator[Any], timeout_s: float) -> None:
        self._elements, self._timeout_s = elements, timeout_s
        self._said: queue.SimpleQueue[tuple[Literal["take", "give", "end"], Any]]
        self._said = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._next = next(elements, _END)
        self._ended = self._next is _END

    # -- the function's side, see TFManager.Elements -----------------------------------------------

    def take(self, count: int, train_mode: bool) -> list[Any]:
        """The next elements, in order."""
        if self._ended:
            return []
        self._said.put(("take", count))
        # without a limit: Spark may compute the next elements for as long as it takes
        return self._answers.get()

    def give(self, results: Sequence[Any]) -> None:
        """Takes the results of the elements that were taken last."""
        self._said.put(("give", list(results)))

    def should_stop(self) -> bool:
        """Whether there are no more elements."""
        return self._ended

    def terminate(self) -> None:
        """Gives no more elements."""
        self._ended = True

    # -- the partition's side ----------------------------------------------------------------------

    def results(self, function: Callable[[], object]) -> Iterator[Any]:
        """Calls the function and yields what it gives; it is not called if there are no elements.

        Raises:
            WaitTimeoutError: The function stalls; with the lines at which it stands.
            DataError: It gave another number of results than there are elements.
            Exception: What it raised.
        """
        if self._ended:
            return
        called = ThreadCall(function, "sparkdl-inference")
        called.outcome.add_done_callback(lambda _: self._said.put(("end", None)))
        given = taken = 0
        try:
            while True:
                kind, content = self._listen(called)
                if kind == "take":
                    found = [self._next, *islice(self._elements, content - 1)]
                    taken += len(found)
                    self._next = next(self._elements, _END)
                    self._ended = self._ended or self._next is _END
                    self._answers.put(found)
                elif kind == "give":
                    given += len(content)
                    if given > taken:
                        raise _wrong_count(f"{taken} for the elements so far", f"{given}")
                    yield from content
                else:
                    break
            called.outcome.result()
            if given != taken or self._next is not _END:
                rest = " and an end of the function before the last" * (self._next is not _END)
                raise _wrong_count(f"{taken} for as many elements", f"{given}{rest}")
        finally:
            self._ended = True
            self._answers.put([])  # for a function that waits while nobody wants its results
            with suppress(TimeoutError):  # else it is left behind
                called.outcome.exception(_LEAVE_S)

    def _listen(self, called: ThreadCall) -> tuple[Literal["take", "give", "end"], Any]:
        try:
            return self._said.get(timeout=self._timeout_s)
        except queue.Empty as error:
            raise WaitTimeoutError(
                "a function for inference takes no rows and gives no results",
                expected=f"a call of its feed within {self._timeout_s:g} s",
                received=f"none; it stands here:\n{called.stack()}",
                hint="feed_timeout is the limit",
            ) from error


def _wrong_count(expected: str, received: str) -> DataError:
    return DataError(
        "a function for inference gave another number of results than it was given elements",
        expected=expected,
        received=received,
        hint="batch_results takes one result for each element of next_batch, in order",
    )
