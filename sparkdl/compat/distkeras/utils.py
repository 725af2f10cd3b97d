"""dist-keras' helpers: rows shuffled or cached, models as dicts, numbers as one-hot vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import Row
from pyspark.sql import functions as F

from sparkdl.errors import DataError
from sparkdl.learner.checks.compiling import model_from_json


def shuffle(dataset: Any) -> Any:
    """The rows of a DataFrame in a random order."""
    return dataset.orderBy(F.rand())


def precache(dataset: Any, num_workers: int) -> Any:
    """A DataFrame in as many partitions as there are workers, computed and cached."""
    cached = dataset.repartition(num_workers).cache()
    cached.count()
    return cached


def serialize_keras_model(model: Any) -> dict[str, Any]:
    """A model as ``{'model': JSON, 'weights': arrays}``."""
    return {"model": model.to_json(), "weights": model.get_weights()}


def deserialize_keras_model(dictionary: dict[str, Any]) -> Any:
    """The counterpart of :func:`serialize_keras_model`; the model is not compiled."""
    model = model_from_json(dictionary["model"], {})
    model.set_weights(dictionary["weights"])
    return model


def uniform_weights(model: Any, constraints: Sequence[float] = (-0.5, 0.5)) -> None:
    """Gives a model weights that are drawn evenly between two bounds."""
    low, high = constraints
    rng = np.random.default_rng()
    model.set_weights([rng.uniform(low, high, np.shape(w)) for w in model.get_weights()])


def to_one_hot_encoded_dense(value: float, n_dim: int = 2) -> npt.NDArray[np.float64]:
    """A vector of zeros with a 1 at ``value``.

    Raises:
        DataError: There is no such place.
    """
    index = int(value)
    if not 0 <= index < n_dim:
        raise DataError(
            "a label is no class", expected=f"0 to {n_dim - 1}", received=str(value),
            hint="output_dim is the number of classes",
        )  # fmt: skip
    vector = np.zeros(n_dim)
    vector[index] = 1.0
    return vector


def new_dataframe_row(old_row: Any, column_name: str, column_value: Any) -> Any:
    """A row with one more column."""
    return Row(*old_row.__fields__, column_name)(*old_row, column_value)


def json_to_dataframe_row(string: str) -> Any:
    """A row from a JSON object."""
    return Row(**json.loads(string))
