"""Callbacks that read and write the model: on Spark as in plain Keras.

Two workers that together take all rows in one batch train what one process does, whatever the order
of the rows.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl import SparkModel
from sparkdl.errors import SparkDLError

MODES = [("synchronous", 2), ("allreduce", 2), ("asynchronous", 1)]


@keras.saving.register_keras_serializable("test_callbacks")
class Annealed(layers.Layer):
    """Adds a loss with a weight that callbacks set; scales by a whole number that they set, too."""

    def build(self, shape: Any) -> None:
        self.strength = self.add_weight(
            name="strength", shape=(), initializer="zeros", trainable=False
        )
        self.level = self.add_weight(
            name="level", shape=(), initializer="ones", dtype="int32", trainable=False
        )

    def call(self, x: Any) -> Any:
        self.add_loss(self.strength * keras.ops.mean(keras.ops.square(x)))
        return x * keras.ops.cast(self.level, x.dtype)


def make_model(momentum: float = 0.9) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(16, "tanh"),
            Annealed(),
            layers.Dense(10, "softmax"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=momentum), "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )  # fmt: skip
    return model


class Writes(keras.callbacks.Callback):
    """Writes variables of every kind, and keeps the weights that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[np.ndarray] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[1].strength.assign(0.2 * epoch)
        self.model.optimizer.learning_rate = 0.1 / (epoch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        first, annealed, last = self.model.layers
        self.read.append(first.get_weights()[0])
        annealed.level.assign(1 + epoch % 2)
        first.set_weights([np.clip(w, -0.1, 0.1) for w in first.get_weights()])
        last.bias.assign(last.bias * 0.5)
        if epoch == 1:
            for variable in self.model.optimizer.variables:
                if "momentum" in variable.path:
                    variable.assign(np.zeros(variable.shape))


def same_weights(one: Any, other: Any) -> None:
    for mine, known in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, known, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("mode", "workers"), MODES)
def test_what_callbacks_write_is_trained(
    digits_df: Any, digits: Any, mode: str, workers: int
) -> None:
    x, y = digits
    mine, known = Writes(), Writes()
    spark_model = SparkModel(make_model(), mode, num_workers=workers, batch_size=len(x))
    history = spark_model.fit(digits_df, epochs=4, callbacks=[mine], verbose=0)
    alone = make_model()
    expected = alone.fit(x, y, epochs=4, batch_size=len(x), callbacks=[known], verbose=0)
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"], rtol=1e-4, atol=1e-5
    )
    for seen, wanted in zip(mine.read, known.read, strict=True):
        np.testing.assert_allclose(seen, wanted, rtol=0, atol=1e-5)
    same_weights(spark_model.model, alone)
    assert int(spark_model.model.layers[1].level) == int(alone.layers[1].level) == 2


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_what_cannot_reach_the_workers_is_an_error(digits_df: Any, mode: str) -> None:
    class Freezes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].trainable = False

    spark_model = SparkModel(make_model(), mode, num_workers=1, batch_size=64)
    with pytest.raises(SparkDLError, match="trainable"):
        spark_model.fit(digits_df, epochs=3, callbacks=[Freezes()], verbose=0)


def test_the_best_weights_are_those_that_were_evaluated(digits_df: Any, digits: Any) -> None:
    x, y = digits
    best = keras.callbacks.EarlyStopping("val_loss", patience=50, restore_best_weights=True)
    model = make_model()
    model.optimizer.learning_rate = 1.5  # so that val_loss goes up and down
    spark_model = SparkModel(model, "asynchronous", num_workers=2, batch_size=16)
    history = spark_model.fit(
        digits_df, epochs=6, callbacks=[best], validation_data=digits_df, verbose=0
    )
    loss, _ = spark_model.model.evaluate(x, y, batch_size=len(x), verbose=0)
    assert loss == pytest.approx(min(history.history["val_loss"]), rel=1e-4)
