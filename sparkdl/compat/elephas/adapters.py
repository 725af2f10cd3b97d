"""Arrays as RDDs, vectors and DataFrames and back; the kinds of models, modes and frequencies.

Elephas' ``ml.adapter``, ``mllib.adapter``, ``utils`` and ``enums`` are paths to these names.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark.mllib.regression import LabeledPoint
from pyspark.sql import SparkSession

from sparkdl.errors import DataError
from sparkdl.learner.description import name_of_loss
from sparkdl.mllib import from_labeled_point, from_vector, to_labeled_point, to_simple_rdd
from sparkdl.spark import mllib
from sparkdl.spark.session.running import with_this_interpreter

__all__ = [
    "Frequency", "LossModelTypeMapper", "Mode", "ModelType", "df_to_simple_rdd", "encode_label",
    "from_data_frame", "from_labeled_point", "lp_to_simple_rdd", "to_data_frame",
    "to_labeled_point", "to_simple_rdd",
]  # fmt: skip

Array = npt.NDArray[Any]

_REGRESSION = (
    "mean_squared_error", "mean_absolute_error", "mse", "mae", "cosine_proximity",
    "cosine_similarity", "mean_absolute_percentage_error", "mape", "log_cosh", "logcosh", "huber",
    "mean_squared_logarithmic_error", "msle", "poisson",
)  # fmt: skip
_CLASSIFICATION = (
    "binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy",
)  # fmt: skip


class Frequency(StrEnum):
    """A frequency; each is also its name."""

    EPOCH = "epoch"
    BATCH = "batch"


class Mode(StrEnum):
    """A mode; each is also its name."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"
    HOGWILD = "hogwild"


class ModelType(Enum):
    """The kind of a model's predictions."""

    CLASSIFICATION = 1
    REGRESSION = 2


class LossModelTypeMapper:
    """The names of losses and what models with them predict; one list for the whole process."""

    _types: ClassVar[dict[str, ModelType]] = {
        **dict.fromkeys(_REGRESSION, ModelType.REGRESSION),
        **dict.fromkeys(_CLASSIFICATION, ModelType.CLASSIFICATION),
    }

    def get_model_type(self, loss: object) -> ModelType | None:
        """The kind of a model's predictions with this loss; None for one that is not listed."""
        return self._types.get(name_of_loss(loss))

    def register_loss(self, loss: str | Callable[..., Any], model_type: ModelType) -> None:
        """Adds a loss to the list."""
        self._types[name_of_loss(loss)] = model_type


def encode_label(label: float, nb_classes: int) -> npt.NDArray[np.float64]:
    """A class number as a one-hot vector ``(nb_classes,)``.

    Raises:
        DataError: It is no class.
    """
    if label != int(label) or not 0 <= label < nb_classes:
        raise DataError(
            "a label is no class", expected=f"a whole number from 0 to {nb_classes - 1}",
            received=str(label),
        )  # fmt: skip
    encoded = np.zeros(nb_classes)
    encoded[int(label)] = 1.0
    return encoded


def lp_to_simple_rdd(lp_rdd: Any, categorical: bool = False, nb_classes: int | None = None) -> Any:
    """An RDD of ``LabeledPoint`` as an RDD of pairs ``(x, y)``."""
    if not categorical:
        return lp_rdd.map(lambda point: (from_vector(point.features), point.label))
    classes = nb_classes
    if not classes:  # one more than the greatest label; a job finds it
        greatest = lp_rdd.mapPartitions(lambda points: [max((p.label for p in points), default=-1)])
        classes = int(max(with_this_interpreter(greatest).collect(), default=-1)) + 1
    return lp_rdd.map(lambda p: (from_vector(p.features), encode_label(p.label, classes)))


def to_data_frame(sc: object, features: Array, labels: Array, categorical: bool = False) -> Any:
    """Arrays as a DataFrame of vectors and labels; see :func:`sparkdl.mllib.to_labeled_point`."""
    points = to_labeled_point(sc, features, labels, categorical)
    return SparkSession.builder.getOrCreate().createDataFrame(points)


def from_data_frame(
    df: object, categorical: bool = False, nb_classes: int | None = None
) -> tuple[Array, Array]:
    """A DataFrame as arrays; see :func:`sparkdl.mllib.from_labeled_point`."""
    return from_labeled_point(_labeled_points(df, "features", "label"), categorical, nb_classes)


def df_to_simple_rdd(
    df: object,
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
        return LabeledPoint(row[1], mllib.to_vector(np.asarray(values, np.float64)))

    return df.select(features, label).rdd.map(point)
