"""Models that several tests on Spark train."""

from __future__ import annotations

from typing import Any


def make_mlp(inputs: int = 64, classes: int = 10, optimizer: Any = "adam", **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(64, activation=options.pop("activation", "relu")),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )
    model.compile(
        optimizer, options.pop("loss", "sparse_categorical_crossentropy"),
        metrics=options.pop("metrics", ["accuracy"]),
    )  # fmt: skip
    return model
