"""A model that is large beside limits which tests set, and its rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def large_model() -> Any:
    """2.1 MB of weights, 6.4 MB with Adam's state."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((4,), dtype="int32"),
            keras.layers.Embedding(4096, 128),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.integers(0, 4096, (64, 4)).astype("int32")
    return x, (x.sum(axis=1, keepdims=True) / 8192 - 1).astype("float32")


def frame_of(spark: Any) -> Any:
    pairs = [(x.tolist(), float(y[0])) for x, y in zip(*rows(), strict=True)]
    return spark.createDataFrame(pairs, "features array<int>, label double").repartition(2)
