"""A model for ``sparkdl train tests/spark/cli_model.py:make``."""

from __future__ import annotations

from typing import Any


def make() -> Any:
    import keras

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="line")
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model
