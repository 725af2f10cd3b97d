"""A rank's failure on its way out of a barrier task that raises: described, carried, read again.

Spark passes on an exception's text only. It holds a description for people and one for the driver.
"""

from __future__ import annotations

import json
from typing import Any

from sparkdl.errors import WorkerError
from sparkdl.launch.gathering import taken_along
from sparkdl.launch.results import describe_error

_MARK, _END = "--sparkdl-failure--", "--end--"
_TRACEBACK_CHARS = 8000


class RankFailure(RuntimeError):
    """Raised from a Spark task: a description for people, and one for the driver."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.described = described
        text = json.dumps(described)
        super().__init__(
            f"rank {described['rank']} failed: {described['error']}\n{_MARK}{text}{_END}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.described,)


def described_in(error: BaseException) -> dict[str, Any] | None:
    """What a :class:`RankFailure` inside Spark's exception describes, or None."""
    text = str(error)
    start = text.find(_MARK)
    end = text.find(_END, start)
    if start < 0 or end < 0:
        return None
    try:
        described: dict[str, Any] = json.loads(text[start + len(_MARK) : end])
    except ValueError:
        return None
    return described


def describe(rank: int, error: BaseException) -> dict[str, Any]:
    """An exception on a rank as JSON of bounded size."""
    described = describe_error(error)
    trace = described["traceback"]
    if len(trace) > _TRACEBACK_CHARS:
        described["traceback"] = f"...\n{trace[-_TRACEBACK_CHARS:]}"
    described["error"] = described["error"][:2000]
    return {**described, "rank": rank, "taken_along": taken_along(error)}


def worker_error(described: dict[str, Any], hint: str = "") -> WorkerError:
    """What the driver raises for a rank's failure."""
    return WorkerError(
        int(described["rank"]), str(described["error"]), str(described["traceback"]), hint
    )
