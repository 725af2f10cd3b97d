"""What differs between Spark 3.5 and Spark 4, each difference once.

Everything else of the package calls these functions and knows one Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class ArrowStage(Protocol):
    """Rows that are computed when they are asked for: a DataFrame or an RDD."""

    def collect(self) -> list[Row]: ...


def spark_version() -> tuple[int, int]:
    """Major and minor version of the installed PySpark, e.g. ``(3, 5)``."""
    import pyspark

    major, minor = pyspark.__version__.split(".")[:2]
    return int(major), int(minor)


def arrow_stage(
    frame: DataFrame,
    function: ArrowFunction,
    schema: str,
    *,
    barrier: bool = False,
    profile: ResourceProfile | None = None,
) -> ArrowStage:
    """A function on the Arrow batches of every partition, in one stage that is not started yet.

    Args:
        frame: One partition for each task.
        function: See ``DataFrame.mapInArrow``.
        schema: Of what the function yields.
        barrier: Whether all tasks start together.
        profile: What each task of the stage is given; None: as the session says.
    """
    stage: ArrowStage
    if profile is None:
        stage = frame.mapInArrow(function, schema, barrier=barrier)
    elif spark_version() >= (4, 0):
        stage = frame.mapInArrow(function, schema, barrier=barrier, profile=profile)
    else:
        # Spark 3.5 gives resources to stages of RDDs alone: here that of the function.
        rows = frame.mapInArrow(function, schema, barrier=barrier).rdd
        stage = rows.withResources(profile)
    return stage
