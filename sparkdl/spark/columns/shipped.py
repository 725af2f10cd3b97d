"""Tables of the driver's process as DataFrames, without keeping the ones before."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pyarrow as pa

_LIMIT_BYTES = 64 << 20
"""So much of tables that nobody uses any more may stay in the driver's JVM."""
_lock = threading.Lock()
_shipped_bytes = 0
"""Since this module collected garbage last."""


def ship_table(spark: Any, table: pa.Table) -> Any:
    """``spark.createDataFrame(table)``; the JVM gives back the rows of frames that are gone.

    The driver's JVM holds the rows of such a frame as long as Python has its objects. Those are
    in reference cycles (py4j's), and nothing tells Python's collector how much the JVM holds, so
    it would come too late: a fit of 94 MB of arrays, repeated in a notebook, filled the JVM's
    gigabyte after some ten times.

    Args:
        spark: A SparkSession.
        table: The rows.
    """
    global _shipped_bytes
    with _lock:
        full = _shipped_bytes > 0 and _shipped_bytes + table.nbytes > _LIMIT_BYTES
        _shipped_bytes = table.nbytes + (0 if full else _shipped_bytes)
    if full:
        gc.collect()
    return spark.createDataFrame(table)
