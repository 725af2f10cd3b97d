"""Why a rank failed: described on the rank, carried to the driver, raised there.

A description is JSON, so that nothing is unpickled on the driver. It comes as a result row, or
inside the text of an exception that a rank raises, which is all that Spark passes on of one.
Where a rank fails the others soon fail too, because they lose their connections to it: theirs are
*secondary failures*, and the driver raises the first cause.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sparkdl.errors import (
    SparkDLError,
    TransportError,
    WaitTimeoutError,
    WorkerError,
    beats_of,
    raised_of,
)
from sparkdl.finite import NotFiniteError
from sparkdl.launch.results import Result, of_kind

SECONDARY_DELAY_S = 6.0
"""A rank with a secondary failure waits so long before it tells, so that the cause is first."""
_MARK, _END = "--sparkdl-failure--", "--end--"
_ERROR_CHARS, _TRACEBACK_CHARS = 2000, 8000


class RanksLost(WorkerError):
    """Ranks ended and nobody could say why: killed processes, lost executors."""


@dataclass(frozen=True)
class FailureDescription:
    """Why a rank failed.

    Args:
        rank: The rank that failed.
        type: Name of the exception's class.
        error: The exception as one line, at most 2,000 characters.
        traceback: The end of the traceback, at most 8,000 characters.
        secondary: Whether it most likely failed because another rank had failed.
        beats: Of :func:`sparkdl.errors.beats_of`.
        lines: The last lines that the rank could not send to the driver.
    """

    rank: int
    type: str
    error: str
    traceback: str
    secondary: bool = False
    beats: dict[str, str] | None = None
    lines: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> FailureDescription:
        """Describes an exception on a rank."""
        if isinstance(error, RankFailure):
            return error.failure
        if isinstance(error.__cause__, ChildTraceback):
            return error.__cause__.failure
        if isinstance(error, WorkerError):  # it tells of a rank, this one or another
            return cls(error.rank, "WorkerError", error.error, _cut(error.traceback))
        return cls(
            rank,
            type(error).__name__,
            one_line(error)[:_ERROR_CHARS],
            _cut("".join(traceback.format_exception(error))),
            is_secondary(error),
            beats_of(error),
        )

    def to_json(self) -> str:
        """The counterpart of :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FailureDescription:
        """The counterpart of :meth:`to_json`."""
        return cls(**json.loads(text))

    def result(self, rank: int) -> Result:
        """The description as what ``rank`` returns."""
        return Result(rank, "failed", self.to_json())

    def worker_error(self, hint: str = "") -> WorkerError:
        """What the driver raises for whatever the user's function raised."""
        return WorkerError(self.rank, self.error, self.traceback, hint)

    def library_error(self) -> SparkDLError:
        """What the driver raises: an error of this library as itself, any other as WorkerError."""
        raised = None if self.beats is None else raised_of(self.beats, self.rank)
        return raised or self.worker_error()


class ChildTraceback(Exception):
    """The cause of an exception that comes from a child process: what happened there.

    Args:
        failure: The exception as the child described it.
    """

    def __init__(self, failure: FailureDescription) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"\n{self.failure.traceback}"


class RankFailure(RuntimeError):
    """Raised from a rank: its text has a description for people and one for the driver."""

    def __init__(self, failure: FailureDescription) -> None:
        self.failure = failure
        super().__init__(
            f"rank {failure.rank} failed: {failure.error}\n{_MARK}{failure.to_json()}{_END}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.failure,)


def failure_in(error: BaseException) -> FailureDescription | None:
    """What a :class:`RankFailure` inside Spark's exception describes, or None."""
    text = str(error)
    start = text.find(_MARK)
    end = text.find(_END, start)
    if start < 0 or end < 0:
        return None
    try:
        return FailureDescription.from_json(text[start + len(_MARK) : end])
    except (ValueError, TypeError):
        return None


def failures_of(results: Iterable[Result]) -> list[FailureDescription]:
    """The failures that ranks returned, in rank order."""
    return [FailureDescription.from_json(r.text) for r in of_kind(results, "failed").values()]


def root_cause(failures: Iterable[FailureDescription]) -> FailureDescription | None:
    """The first failure that no other rank caused; if all are secondary, the first of them."""
    return min(failures, key=lambda failure: failure.secondary, default=None)


def is_secondary(error: BaseException) -> bool:
    """Whether a rank most likely failed because another rank had failed."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return False
        told = seen.__cause__ if isinstance(seen.__cause__, ChildTraceback) else seen
        if isinstance(told, (ChildTraceback, RankFailure)):
            return told.failure.secondary
        if isinstance(seen, TransportError) and not isinstance(seen, WaitTimeoutError):
            return True
        if isinstance(seen, NotFiniteError) and seen.joined:
            return True
        # inside a compiled graph frameworks keep only the text of an exception
        text = f"{type(seen).__name__}: {seen}"
        if "HorovodInternalError" in text or "Horovod has been shut down" in text:
            return True
        if "TransportError: " in text or "is gone; rank" in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def one_line(error: BaseException) -> str:
    """An exception without its traceback, as Python prints it."""
    return "".join(traceback.format_exception_only(error)).strip()


def _cut(trace: str) -> str:
    return trace if len(trace) <= _TRACEBACK_CHARS else f"...\n{trace[-_TRACEBACK_CHARS:]}"
