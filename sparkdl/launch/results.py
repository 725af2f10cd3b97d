"""What a task of either kind returns: rows that Spark collects on the driver."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.errors import SparkDLError

RESULT_SCHEMA = "rank long, kind string, text string, content binary"
CHUNK_BYTES = 2 << 20
"""Results come back in rows of at most this size (Connect bounds an Arrow batch at 4 MiB)."""


@dataclass(frozen=True)
class Result:
    """One row of what a task returns."""

    rank: int
    kind: str
    text: str = ""
    content: bytes = b""


def failure_result(rank: int, error: BaseException) -> Result:
    """An exception as a result row: a JSON object, so that no code travels back."""
    return Result(rank, "failed", json.dumps(describe_error(error)))


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: its class, its message beats and its traceback."""
    described: dict[str, Any] = {
        "type": type(error).__name__,
        "error": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, SparkDLError):
        described["beats"] = {
            "what": error.what,
            "expected": error.expected,
            "received": error.received,
            "hint": error.hint,
        }
    return described


def to_batch(results: list[Result]) -> pa.RecordBatch:
    """Result rows as one Arrow batch of ``RESULT_SCHEMA``."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array([r.rank for r in results], pa.int64()),
            pa.array([r.kind for r in results], pa.string()),
            pa.array([r.text for r in results], pa.string()),
            pa.array([r.content for r in results], pa.binary()),
        ],
        names=["rank", "kind", "text", "content"],
    )
