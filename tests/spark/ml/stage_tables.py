"""The rows, models and estimators of the cases."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

ROWS = 240
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 4)).astype("float32")
Y = X[:, :3].argmax(1)
WEIGHTS = [4 * 8 + 8, 8 * 3 + 3]


def builder(units: int = 8, classes: int = 3, last: str | None = "softmax") -> Any:
    import keras

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(classes, activation=last),
        ]
    )
    losses = {1: "binary_crossentropy", 3: "sparse_categorical_crossentropy"}
    model.compile(keras.optimizers.Adam(0.02), losses[classes], metrics=["accuracy"])
    return model


def weights_digest(stage: Any) -> str:
    """Of the bytes of a fitted stage's weights, and of its optimizer's variables."""
    digest = hashlib.sha256()
    optimizer = getattr(stage.model, "optimizer", None)  # none without compile
    for variable in (*stage.model.variables, *(optimizer.variables if optimizer else ())):
        digest.update(np.asarray(variable).tobytes())
    return digest.hexdigest()


def table(spark: Any, kind: str = "vector") -> Any:
    """``features`` of a kind, ``label``, ``weight``, ``is_validation``, four numbers, ``id``."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import functions as F

    rows = [
        (X[i].tolist(), float(Y[i]), 1.0, i % 5 == 0, *X[i].tolist(), i) for i in range(ROWS)
    ]  # fmt: skip
    frame = spark.createDataFrame(
        rows, "features array<float>, label double, weight float, is_validation boolean, "
        "a float, b float, c float, d float, id int",
    )  # fmt: skip
    if kind == "vector":
        doubles = F.col("features").cast("array<double>")
        return frame.withColumn("features", array_to_vector(doubles))
    if kind == "sparse":
        vectors = [(Vectors.sparse(4, range(4), X[i].astype(float)), float(Y[i]), i)
                   for i in range(ROWS)]  # fmt: skip
        return spark.createDataFrame(vectors, ["features", "label", "id"])
    return frame


def quick(**arguments: Any) -> Any:
    from sparkdl.ml import KerasClassifier

    return KerasClassifier(
        **{"model": builder(), "epochs": 2, "batchSize": 16, "numWorkers": 2, **arguments}
    )
