"""The rows of ``run(fn, data=...)`` on the driver."""

from __future__ import annotations

from typing import Any, get_args

from sparkdl.config import require_int, require_name, require_seconds
from sparkdl.data.feed import Uneven
from sparkdl.errors import ConfigError
from sparkdl.launch.feeding import FeedSettings
from sparkdl.spark.columns.files import frame_of_files, is_path
from sparkdl.spark.columns.local_data import as_frame
from sparkdl.spark.columns.sources import is_frame
from sparkdl.spark.columns.wire import is_vector_column, wire_names
from sparkdl.spark.driver.cluster import session_of


def fed_frame(data: Any, spark: Any) -> tuple[Any, tuple[str, ...]]:
    """The rows as a frame that ``mapInArrow`` takes, and the names of its columns.

    Raises:
        ConfigError: It is no DataFrame.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    data = as_frame(data)
    if is_path(data):
        data = frame_of_files(spark if spark is not None else session_of(), data)
    if not is_frame(data) or data.isStreaming or len(set(data.columns)) < len(data.columns):
        raise ConfigError(
            "data cannot be fed to the ranks",
            expected="a DataFrame whose rows end and whose columns have different names",
            received="a stream" if is_frame(data) and data.isStreaming else type(data).__name__,
        )
    columns = []
    for name, field in zip(wire_names(len(data.columns)), data.schema.fields, strict=True):
        column = F.col("`" + field.name.replace("`", "``") + "`")
        if is_vector_column(field.dataType):
            column = vector_to_array(column)
        columns.append(column.alias(name))
    return data.select(*columns), tuple(data.columns)


def feed_settings(
    data: Any,
    epochs: int | None,
    shuffle: bool,
    seed: int,
    uneven: Uneven,
    memory_budget_mb: int,
    stall_timeout_s: float | None = None,
) -> FeedSettings | None:
    """The arguments of ``run`` about its data, checked, still without columns; None without data.

    Raises:
        ConfigError: One that cannot be used, or has no effect as there are no data.
    """
    if epochs is not None:
        require_int("epochs", epochs, 1)
    require_name("uneven", uneven, get_args(Uneven))
    require_int("memory_budget_mb", memory_budget_mb, 1)
    if stall_timeout_s is not None:
        require_seconds("stall_timeout_s", stall_timeout_s)
    settings = FeedSettings(
        (), epochs, bool(shuffle), int(seed), uneven, memory_budget_mb << 20, stall_timeout_s
    )
    if data is None and settings != FeedSettings(()):
        raise ConfigError(
            "run is told how to give rows to the function, and has none",
            expected="data=..., or none of epochs, shuffle, seed, uneven, memory_budget_mb "
            "and stall_timeout_s",
            received="data=None",
        )
    return None if data is None else settings
