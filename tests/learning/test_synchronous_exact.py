"""Synchronous training of N workers is one process on the global batch, to the last digits."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from harness import global_batches, run_workers, split

from sparkdl.data import ColumnSpec, DataSpec, read_partition, rows_from_numpy
from sparkdl.data.columns import Padding
from sparkdl.rules import BSP

SIZES = {
    "2 even": [200, 200],
    "3 even": [136, 136, 136],
    "2 uneven": [203, 137],
    "3 uneven, one empty": [161, 0, 55],
    "2, one smaller than a batch": [200, 3],
}


def _data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 12)).astype("float32")
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int32") + (x[:, 3] > 1)


def _maker(optimizer: Any) -> Any:
    def make() -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return make


OPTIMIZERS = {
    "SGD with momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_weights_equal_one_process_on_the_global_batch(optimizer: Any, sizes: list[int]) -> None:
    batch_size, epochs = 8, 2
    x, y = _data(sum(sizes))
    parts = split(x, y, sizes)
    result = run_workers(
        _maker(optimizer), parts, BSP(payload="gradient"), epochs=epochs, batch_size=batch_size
    )

    model = _maker(optimizer)()
    steps = 0
    for _ in range(epochs):
        for bx, by in global_batches(parts, batch_size):
            model.train_on_batch(bx, by)
            steps += 1
    assert steps >= 34
    expected = np.concatenate([np.asarray(v).ravel() for v in model.trainable_variables])
    for weights in result.weights:
        np.testing.assert_allclose(weights, expected, atol=1e-5, rtol=0)


def test_batchnorm_statistics_are_averaged_by_rows() -> None:
    x, y = _data(48)
    x[:32] += 3.0  # the first worker's rows have another mean

    def make() -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.BatchNormalization(momentum=0.0),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
        return model

    parts = split(x, y, [32, 16])
    result = run_workers(make, parts, BSP(payload="gradient"), batch_size=32)
    # momentum 0: each worker's moving mean is its batch's; together the mean over all 48 rows.
    moving_mean = result.layout.views(result.weights[0])[-2]
    np.testing.assert_allclose(moving_mean, x.mean(0), atol=1e-5)


def test_local_sgd_of_one_worker_is_plain_training() -> None:
    x, y = _data(83)
    make = _maker(OPTIMIZERS["Adam"])
    result = run_workers(make, [(x, y)], BSP(payload="delta"), epochs=2, batch_size=8, window=4)
    model = make()
    for _ in range(2):
        for start in range(0, len(x), 8):
            model.train_on_batch(x[start : start + 8], y[start : start + 8])
    expected = np.concatenate([np.asarray(v).ravel() for v in model.trainable_variables])
    np.testing.assert_allclose(result.weights[0], expected, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 0, 40])
def test_workers_of_unequal_length_take_the_same_rounds(window: int) -> None:
    x, y = _data(150)
    parts = split(x, y, [101, 49])
    make = _maker(OPTIMIZERS["SGD with momentum"])
    result = run_workers(make, parts, BSP(payload="delta"), epochs=2, batch_size=8, window=window)
    np.testing.assert_array_equal(result.weights[0], result.weights[1])


def test_padding_and_class_weights_are_exact_too() -> None:
    """Workers pad to the longest row of their own batch; one process to that of all rows."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 20, (300, 9)) * (np.arange(9) < rng.integers(1, 10, 300)[:, None])
    y = (x.max(1) > 15).astype("int32") + (x[:, 0] > 10)
    class_weight = {0: 3.0, 1: 0.25}

    def make() -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(20, 4, mask_zero=True),
                keras.layers.SimpleRNN(6),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy")
        return model

    def rows_of(x: Any, y: Any) -> Any:
        table = pa.table({"x": [row[row > 0].tolist() for row in x], "y": y})
        words = ColumnSpec(("x",), (None,), "int32", padding=Padding())
        spec = DataSpec({"x": words}, {"y": ColumnSpec(("y",), (), "int32", "scalars", classes=3)})
        return read_partition(table.to_batches(), spec).train

    parts = split(x, y, [180, 120])
    result = run_workers(
        make, parts, BSP(payload="gradient"), epochs=2, class_weight=class_weight, rows_of=rows_of
    )
    model = make()
    for _ in range(2):
        for bx, by in global_batches(parts, 8):
            model.train_on_batch(bx, by, class_weight=class_weight)
    expected = np.concatenate([np.asarray(v).ravel() for v in model.trainable_variables])
    start = np.concatenate([np.asarray(v).ravel() for v in make().trainable_variables])
    assert np.abs(expected - start).max() > 0.1
    for weights in result.weights:
        np.testing.assert_allclose(weights, expected, atol=1e-5, rtol=0)


def test_a_worker_without_rows_steps_as_the_others_where_a_variable_has_no_gradient():
    """Weight decay moves what has a gradient: an output without a loss stays as it is."""

    def make():
        keras.utils.set_random_seed(1)
        given = keras.Input((4,))
        outputs = [keras.layers.Dense(1, name=name)(given) for name in ("a", "b")]
        model = keras.Model(given, outputs)
        model.compile(keras.optimizers.SGD(0.05, weight_decay=0.2), ["mse", None])
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.normal(size=(24, 1)).astype("float32")
    result = run_workers(
        make, split(x, y, [24, 0]), BSP(payload="gradient"), batch_size=8,
        rows_of=lambda x, y: rows_from_numpy(x, {"a": y}),
    )  # fmt: skip
    first, second = result.models
    for mine, others, before in zip(
        first.trainable_variables, second.trainable_variables, make().trainable_variables,
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(mine, others, mine.path)
        if mine.path.startswith("b/"):
            np.testing.assert_array_equal(mine, before, mine.path)
