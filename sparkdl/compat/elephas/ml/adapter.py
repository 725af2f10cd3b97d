"""NumPy arrays as DataFrames with the columns ``features`` and ``label``, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.mllib.regression import LabeledPoint
from pyspark.sql import SparkSession

from sparkdl.compat.elephas.utils.rdd_utils import (
    from_labeled_point,
    lp_to_simple_rdd,
    to_labeled_point,
)
from sparkdl.mllib import to_vector

Array = npt.NDArray[Any]


def to_data_frame(sc: Any, features: Array, labels: Array, categorical: bool = False) -> Any:
    """Arrays as a DataFrame of vectors and labels; see :func:`sparkdl.mllib.to_labeled_point`."""
    points = to_labeled_point(sc, features, labels, categorical)
    return SparkSession.builder.getOrCreate().createDataFrame(points)


def from_data_frame(
    df: Any, categorical: bool = False, nb_classes: int | None = None
) -> tuple[Array, Array]:
    """A DataFrame as arrays; see :func:`sparkdl.mllib.from_labeled_point`."""
    return from_labeled_point(_labeled_points(df, "features", "label"), categorical, nb_classes)


def df_to_simple_rdd(
    df: Any,
    categorical: bool = False,
    nb_classes: int | None = None,
    features_col: str = "features",
    label_col: str = "label",
) -> Any:
    """A DataFrame as an RDD of pairs ``(x, y)``."""
    return lp_to_simple_rdd(_labeled_points(df, features_col, label_col), categorical, nb_classes)


def _labeled_points(df: Any, features: str, label: str) -> Any:
    def point(row: Any) -> LabeledPoint:
        values = row[0].toArray() if hasattr(row[0], "toArray") else row[0]
        return LabeledPoint(row[1], to_vector(np.asarray(values, np.float64)))

    return df.select(features, label).rdd.map(point)
