"""The results of ranks, cut into rows of bounded size for the driver, and joined again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from sparkdl.failures import Failure

RESULT_SCHEMA = "rank long, kind string, text string, content binary"
"""The columns of a row, as Spark writes them."""
CHUNK_BYTES = 2 << 20
"""A row's content has at most this size (Spark Connect bounds an Arrow batch at 4 MiB)."""


class Row(Protocol):
    """One row of :data:`RESULT_SCHEMA`, as Spark or Arrow gives it."""

    @property
    def rank(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def content(self) -> bytes: ...


@dataclass(frozen=True)
class Result:
    """One thing that a rank returns.

    Args:
        kind: What it is: a rank returns one result of a kind.
        text: JSON or plain text, small.
        content: Bytes of any size.
    """

    rank: int
    kind: str
    text: str = ""
    content: bytes = b""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The result as Arrow batches of one row each; only the first has the text."""
        for start in range(0, max(1, len(self.content)), CHUNK_BYTES):
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([self.rank], pa.int64()),
                    pa.array([self.kind], pa.string()),
                    pa.array(["" if start else self.text], pa.string()),
                    pa.array([self.content[start : start + CHUNK_BYTES]], pa.binary()),
                ],
                names=["rank", "kind", "text", "content"],
            )


def join(rows: Iterable[Row]) -> list[Result]:
    """The results that the rows are chunks of; rows of one result come in order.

    >>> join([Result(0, 'state', 'a', b'one '), Result(0, 'state', '', b'two')])
    [Result(rank=0, kind='state', text='a', content=b'one two')]
    """
    parts: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.rank, row.kind), []).append(row)
    return [
        Result(rank, kind, chunks[0].text, b"".join(bytes(c.content) for c in chunks))
        for (rank, kind), chunks in parts.items()
    ]


def join_batches(batches: Iterable[pa.RecordBatch]) -> list[Result]:
    """The results in Arrow batches."""
    return join(Result(**row) for batch in batches for row in batch.to_pylist())


def of_kind(results: Iterable[Result], kind: str) -> dict[int, Result]:
    """Rank -> its result of one kind, in rank order."""
    return {r.rank: r for r in sorted(results, key=lambda r: r.rank) if r.kind == kind}


def failed(rank: int, failure: Failure) -> Result:
    """A failure as what ``rank`` returns."""
    return Result(rank, "failed", failure.to_json())


def failures_of(results: Iterable[Result]) -> list[Failure]:
    """The failures that ranks returned, in rank order."""
    return [Failure.from_json(r.text) for r in of_kind(results, "failed").values()]
