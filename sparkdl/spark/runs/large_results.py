"""Large results of a stage, brought to the driver piece by piece.

Spark collects what a task returns as one object: the executor's JVM and the driver's hold all of
it. Here the stage writes its rows to the executors' disks, and jobs of their own fetch some at a
time.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sparkdl.launch.results import CHUNK_BYTES, RESULT_SCHEMA, Row

PIECE_BYTES = 32 << 20
"""Bytes that come in one job, if each row is as large as it can be."""
_PLACE = "place"


def collect_in_pieces(results: Any) -> list[Row]:
    """The rows of a stage that has not begun, in their order within each partition.

    Args:
        results: A DataFrame with :data:`RESULT_SCHEMA`.
    """
    from pyspark.sql import functions as f
    from pyspark.storagelevel import StorageLevel

    placed = results.withColumn(_PLACE, f.monotonically_increasing_id())
    kept = placed.persist(StorageLevel.DISK_ONLY)
    try:
        # The stage runs here, once: its rows are on the disks before the first column is read.
        places = sorted(int(row[_PLACE]) for row in kept.select(_PLACE).collect())
        names = [column.split()[0] for column in RESULT_SCHEMA.split(", ")]
        rows: list[Row] = []
        at_once = max(1, PIECE_BYTES // CHUNK_BYTES)
        for first in range(0, len(places), at_once):
            ends = places[first], places[first : first + at_once][-1]
            part: list[Any] = (
                kept.where(f.col(_PLACE).between(*ends)).select(_PLACE, *names).collect()
            )
            part.sort(key=lambda row: int(row[_PLACE]))
            rows += part
        return rows
    finally:
        with contextlib.suppress(Exception):  # the session may be gone, and the error says so
            kept.unpersist()
