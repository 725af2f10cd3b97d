"""Rows that the tasks of several fits read from one broadcast; Spark computes them once.

The driver collects the selected columns as Arrow and broadcasts them (:func:`share_rows`). An
executor gets them once, and a task reads them without a shuffle and without the JVM's rows
(:func:`batches_of`).
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import pyarrow as pa

from sparkdl.launch.task import batch_to_bytes
from sparkdl.spark.session.versions import map_in_arrow, whole_batches

if TYPE_CHECKING:  # executors import this module, and some have no pyspark
    from pyspark.sql import DataFrame

_READ_ON_S = 5.0
"""Seconds that a task that has ended reads on: a new worker would take longer to come up."""

MOST_BYTES = 256 << 20
"""Larger data are not broadcast: the driver holds them while it collects them."""
HELD_OUT_BYTES = 32 << 20
"""Most bytes of rows to validate on that are broadcast: each worker's host gets all of them."""
_SCHEMA = "size long, content binary"
_ROW = pa.schema([("size", pa.int64()), ("content", pa.binary())])


@dataclass(frozen=True)
class SharedRows:
    """Rows that several fits read.

    Args:
        content: Spark's broadcast of a list of Arrow streams; None for rows that workers read from
            files by themselves.
        key: Key of these rows, these columns and these roles; no others have it.
    """

    content: Any = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def given(
        self, batches: Iterator[pa.RecordBatch], rank: int, num_ranks: int
    ) -> Iterator[pa.RecordBatch]:
        """On the executor: a rank's rows; Spark has brought ``batches``."""
        return batches if self.content is None else batches_of(self.content)

    def destroy(self) -> None:
        """Frees the broadcast on the driver and on all executors."""
        if self.content is not None:
            with contextlib.suppress(Exception):  # the session has ended, and all with it
                self.content.destroy()


class HeldOutRows(SharedRows):
    """Rows to validate on, of which each rank takes a part behind its own rows to train on."""

    @classmethod
    def collect(cls, frame: DataFrame, partitions: int, cached: DataFrame) -> HeldOutRows | None:
        """Broadcasts the rows of a frame with ``partitions``; None if they are too large.

        To collect them takes as long as a short fit. So the next call for the same columns gives
        the same broadcast, as long as the user's frame is there and Spark's cache of it.

        Args:
            frame: Columns of ``cached``.
            cached: The user's frame, which Spark has cached.
        """
        with contextlib.suppress(IndexError):  # another thread's fit takes some, too
            while True:
                SharedRows(_unused.pop()).destroy()
        kept, cache_id = _kept.get(cached), _cache_of(frame)
        if kept is not None and kept.are_of(frame, cache_id):
            return kept.rows
        context, limit_bytes = frame.sparkSession.sparkContext, HELD_OUT_BYTES // partitions
        streams = map_in_arrow(frame, partial(encode, limit_bytes=limit_bytes), _SCHEMA).collect()
        if any(row.size > limit_bytes for row in streams):
            return None
        rows = cls(context.broadcast([bytes(row.content) for row in streams]))
        finalize(rows, _unused.append, rows.content)
        if cache_id is not None:
            _kept[cached] = _Kept(frame, cache_id, rows)
        return rows

    def given(
        self, batches: Iterator[pa.RecordBatch], rank: int, num_ranks: int
    ) -> Iterator[pa.RecordBatch]:
        yield from batches
        for batch in batches_of(self.content):
            first, end = (batch.num_rows * r // num_ranks for r in (rank, rank + 1))
            yield batch.slice(first, end - first)


@dataclass(frozen=True)
class _Kept:
    """Rows for the next fit: those of a frame's columns, from one cache of Spark."""

    frame: DataFrame
    cache_id: int
    rows: HeldOutRows

    def are_of(self, frame: DataFrame, cache_id: int | None) -> bool:
        alike = self.cache_id == cache_id and self.frame.schema == frame.schema
        return alike and bool(frame.sameSemantics(self.frame))


_kept: WeakKeyDictionary[DataFrame, _Kept] = WeakKeyDictionary()
"""The rows of each frame that the user still has."""
_unused: list[Any] = []
"""Broadcasts that no fit and no frame has any more."""


def _cache_of(frame: DataFrame) -> int | None:
    """The number of the cache that Spark reads a frame's rows from; None: it does not say."""
    with contextlib.suppress(Exception):  # Spark's plans are no public interface
        table = frame._jdf.queryExecution().withCachedData().collectLeaves().head()
        return int(table.cacheBuilder().cachedColumnBuffers().id())
    return None


def share_rows(frame: Any, limit_bytes: int) -> SharedRows | None:
    """Broadcasts the rows of a frame in the order of its partitions; None if they are too large.

    The executors keep the Arrow bytes on their disks until the driver knows how large they are
    together, and has taken one partition after another: neither the driver nor its JVM ever holds
    more than the limit.
    """
    from pyspark import StorageLevel
    from pyspark.sql import functions as F

    context = frame.sparkSession.sparkContext
    encoded = map_in_arrow(frame, partial(encode, limit_bytes=limit_bytes), _SCHEMA)
    encoded = encoded.persist(StorageLevel.DISK_ONLY)
    try:
        size = encoded.agg(F.sum("size")).collect()[0][0] or 0
        if size > limit_bytes:
            return None
        streams = [bytes(row.content) for row in encoded.select("content").toLocalIterator()]
    finally:
        encoded.unpersist()
    return SharedRows(context.broadcast(streams))


def batches_of(content: Any) -> Iterator[pa.RecordBatch]:
    """On the executor: the rows in a broadcast of :func:`share_rows`."""
    for stream in content.value:
        with pa.ipc.open_stream(stream) as reader:
            yield from reader


def encode(batches: Iterator[pa.RecordBatch], limit_bytes: int) -> Iterator[pa.RecordBatch]:
    """On the executor: a partition's batches as Arrow streams, a row each.

    Beyond the limit there is one last row, whose size says so and which has no content; the rest
    of the partition is not computed.
    """
    size = 0
    for batch in whole_batches(batches):
        content = batch_to_bytes(batch)
        size += len(content)
        fits = size <= limit_bytes
        row = (len(content), content) if fits else (limit_bytes + 1, b"")
        yield pa.RecordBatch.from_pylist([dict(zip(_ROW.names, row, strict=True))], _ROW)
        if not fits:
            return


def read_to_end(rows: Iterator[object]) -> None:
    """Reads what is left of a task's input, for some seconds at most.

    Spark ends a Python worker that leaves input unread, and with it the framework that the worker
    has imported. A task that found data that do not fit does leave some.
    """
    give_up_at = time.monotonic() + _READ_ON_S
    for _ in rows:
        if time.monotonic() > give_up_at:
            break
