"""Tests of whether something is a DataFrame, an RDD or a column of vectors, also with Connect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.settings.values import shown

if TYPE_CHECKING:
    from pyspark.sql import types as T


def is_frame(data: object) -> bool:
    """Whether ``data`` is a Spark DataFrame, classic or Connect."""
    kind = type(data)  # a Column has every attribute, its class has not
    return kind.__module__.startswith("pyspark.") and hasattr(kind, "mapInArrow")


def without_index(data: Any) -> Any:
    """A DataFrame of ``pyspark.pandas`` as one of Spark, of its columns alone; others as given."""
    if not type(data).__module__.startswith("pyspark.pandas.") or not hasattr(data, "to_spark"):
        return data
    return data.spark.frame()


def is_rdd(data: object) -> bool:
    """Whether ``data`` is an RDD."""
    kind = type(data)
    return (
        kind.__module__.startswith("pyspark.")
        and hasattr(kind, "mapPartitions")
        and not hasattr(kind, "mapInArrow")
    )


def column_named(name: str) -> Any:
    """The column of that name, whatever characters are in it."""
    from pyspark.sql import functions as F

    return F.col("`" + name.replace("`", "``") + "`")


def require_frame(what: str, data: object) -> None:
    """Returns if ``data`` is a DataFrame of Spark.

    Raises:
        ConfigError: It is something else.
    """
    if is_frame(data):
        return
    kind = type(data)
    package = kind.__module__.split(".")[0]
    hint = ""
    if package in ("pandas", "polars", "pyarrow"):
        hint = "spark.createDataFrame(data) makes one of it"
    elif isinstance(data, str):
        hint = f"spark.read.parquet({data!r}) reads files"
    elif isinstance(data, (list, tuple, np.ndarray)):
        hint = "sparkdl.SparkModel(model) trains on arrays: fit((x, y))"
    raise ConfigError(
        f"{what} takes a DataFrame of Spark",
        expected="a DataFrame, such as spark.read.parquet(path)",
        received=shown(data)
        if data is None or isinstance(data, str)
        else f"{kind.__name__} of {package}",
        hint=hint,
    )


def is_vector_column(kind: T.DataType) -> bool:
    """Whether a column holds vectors of ``pyspark.ml`` or ``pyspark.mllib``."""
    return type(kind).__name__ == "VectorUDT"
