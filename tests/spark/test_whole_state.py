"""What the driver has is what trains on a real cluster: state, seeds and settings of a model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from sparkdl import SparkModel

layers = keras.layers
RNG = np.random.default_rng(0)
ROWS, BATCH, EPOCHS = 48, 8, 2


class Counting(layers.Layer):
    """Counts its steps in an integer, which its output depends on."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign(self.steps + 1)
        return x * (1 + keras.ops.cast(self.steps, "float32") / 10)


def model() -> Any:
    """Has nearly all that no configuration and no file holds."""
    keras.utils.set_random_seed(0)
    stack = [
        layers.Dense(6, "relu"),
        Counting(),
        layers.Dense(6, "tanh"),
        layers.Dense(3, "softmax"),
    ]
    made = keras.Sequential([keras.Input((5,)), *stack])
    stack[0].enable_lora(2)
    stack[0].lora_kernel_b.assign(np.full((2, 6), 0.25))
    stack[2].kernel.trainable = False
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    made.compile(optimizer, "sparse_categorical_crossentropy")
    return made


def frame(spark: Any, labels: np.ndarray) -> Any:
    x = RNG.normal(size=(ROWS, 5)).astype("float32")
    rows = [(x[i].tolist(), int(labels[i])) for i in range(ROWS)]
    return spark.createDataFrame(rows, "features array<float>, label int").repartition(2).cache()


def trained_by_keras(made: Any, data: Any, fits: int) -> Any:
    parts = data.rdd.glom().collect()
    steps = max(-(-len(part) // BATCH) for part in parts)
    for _ in range(EPOCHS * fits):
        for step in range(steps):
            rows = [row for part in parts for row in part[step * BATCH : (step + 1) * BATCH]]
            made.train_on_batch(
                np.array([row.features for row in rows], "float32"),
                np.array([row.label for row in rows]),
            )
    return made


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
def test_two_fits_are_keras(spark: Any, mode: str) -> None:
    data = frame(spark, RNG.integers(0, 3, ROWS))
    data.count()
    mine = model()
    spark_model = SparkModel(mine, mode, batch_size=BATCH, repartition=False)
    for _ in range(2):
        spark_model.fit(data, epochs=EPOCHS, verbose=0, shuffle=False)
    plain = trained_by_keras(model(), data, 2)
    assert int(mine.layers[1].steps.numpy()) == int(plain.layers[1].steps.numpy()) == 12
    pairs = [*zip(mine.variables, plain.variables, strict=True)]
    pairs += zip(mine.optimizer.variables, plain.optimizer.variables, strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5, rtol=0)


def test_dropout_of_one_worker_is_that_of_keras(spark: Any) -> None:
    def dropped() -> Any:
        keras.utils.set_random_seed(0)
        stack = [layers.Dense(8, "relu"), layers.Dropout(0.5, seed=42), layers.Dense(3, "softmax")]
        made = keras.Sequential([keras.Input((5,)), *stack])
        made.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return made

    data = frame(spark, RNG.integers(0, 3, ROWS)).coalesce(1).cache()
    mine = dropped()
    SparkModel(mine, "asynchronous", batch_size=BATCH, repartition=False).fit(
        data, epochs=EPOCHS, verbose=0, shuffle=False
    )
    plain = trained_by_keras(dropped(), data, 1)
    for found, expected in zip(mine.variables, plain.variables, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("ignored", [255, -1])
def test_a_label_that_the_loss_ignores_is_no_error(spark: Any, ignored: int) -> None:
    labels = RNG.integers(0, 3, ROWS)
    labels[::5] = ignored
    made = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=ignored))
    data = frame(spark, labels)
    history = SparkModel(made, num_workers=2).fit(data, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_labels_of_some_outputs(spark: Any) -> None:
    given = keras.Input((5,))
    a, b = layers.Dense(1, name="a")(given), layers.Dense(2, name="b")(given)
    made = keras.Model(given, {"a": a, "b": b})
    made.compile("sgd", {"a": "mse"})
    before = made.get_layer("b").get_weights()
    data = frame(spark, RNG.integers(0, 3, ROWS))
    spark_model = SparkModel(made, num_workers=2)
    for label in ("label", {"a": "label"}):
        history = spark_model.fit(data, epochs=1, verbose=0, label=label)
        assert np.isfinite(history.history["loss"]).all()
    np.testing.assert_array_equal(before[0], made.get_layer("b").get_weights()[0])
