"""evaluate: the numbers of one process over all rows, however they lie in partitions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl import SparkModel
from sparkdl.errors import DataError

SIZES = (150, 0, 7, 63)
N = sum(SIZES)


class Largest(keras.metrics.Metric):
    """Sums of the user's own: a mean of squares, held as two variables of different shapes."""

    def __init__(self, name: str = "squares", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.total = self.add_variable((2,), "zeros", name="total")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        squares = keras.ops.sum(keras.ops.square(y_pred))
        self.total.assign_add(keras.ops.stack([squares, -squares]))
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self) -> Any:
        return self.total[0] / self.rows


def binary() -> Any:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([
        keras.Input((4,)),
        layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
        layers.Dropout(0.5),
        layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip
    metrics = [
        "accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"), keras.metrics.F1Score(threshold=0.5, name="f1"),
        Largest(),
    ]  # fmt: skip
    model.compile("sgd", "binary_crossentropy", metrics=metrics)
    return model


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(N, 4)).astype("float32")
    y = (x[:, 0] + rng.normal(size=N) > 0).astype("int32")
    # The partitions differ: their AUCs do not average to the AUC of all rows.
    x[: SIZES[0]] += 1.5 * (y[: SIZES[0], None] * 2 - 1)
    return x, y


@pytest.fixture(scope="module")
def uneven(spark: Any, rows: Any) -> Any:
    x, y = rows
    parts, start = [], 0
    for size in SIZES:
        parts.append([(x[i].tolist(), int(y[i])) for i in range(start, start + size)])
        start += size
    rdd = spark.sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: part)
    return spark.createDataFrame(rdd, "features array<float>, label int")


def test_metrics_are_those_of_all_rows(spark: Any, uneven: Any, rows: Any) -> None:
    x, y = rows
    assert uneven.rdd.glom().map(len).collect() == list(SIZES)
    model = binary()
    want = model.evaluate(x, y[:, None].astype("float32"), batch_size=50, verbose=0,
                          return_dict=True)  # fmt: skip
    before = [w.copy() for w in model.get_weights()]
    got = SparkModel(model, batch_size=32).evaluate(uneven)
    assert next(iter(got)) == "loss"
    assert set(got) == {"loss", "accuracy", "auc", "precision", "recall", "f1", "squares"}
    for name, value in want.items():
        assert got[name] == pytest.approx(np.asarray(value).tolist(), abs=1e-5), name
    start, aucs = 0, []
    for size in SIZES:
        part = slice(start, start + size)
        start += size
        if size:
            aucs.append(model.evaluate(x[part], y[part, None].astype("float32"), verbose=0,
                                       return_dict=True)["auc"])  # fmt: skip
    assert abs(np.mean(aucs) - want["auc"]) > 0.01
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rdd_and_numpy_give_the_same(spark: Any, rows: Any) -> None:
    x, y = rows
    model = SparkModel(binary())
    weights = (np.arange(N) % 2).astype("float32")
    numpy = model.evaluate((x, y))
    rdd = spark.sparkContext.parallelize([(x[i], int(y[i])) for i in range(N)], 2)
    for name, value in model.evaluate(rdd, verbose=1).items():
        assert numpy[name] == pytest.approx(value, abs=1e-5), name
    half = model.evaluate((x, y, weights))
    want = model.model.evaluate(x, y[:, None], sample_weight=weights, verbose=0, return_dict=True)
    assert half["loss"] == pytest.approx(want["loss"], abs=1e-5)


def test_no_rows(spark: Any) -> None:
    model = SparkModel(binary())
    df = spark.createDataFrame([], "features array<float>, label int")
    with pytest.raises(DataError, match=r"(?s)no rows to evaluate.*expected"):
        model.evaluate(df)
    with pytest.raises(DataError, match="no rows to evaluate"):
        model.evaluate((np.zeros((0, 4)), np.zeros(0)))


def test_errors_in_the_data_are_named(spark: Any, rows: Any) -> None:
    x, _ = rows
    df = spark.createDataFrame([(x[0].tolist(), 1.0), (x[1, :3].tolist(), 0.0)],
                               "features array<float>, label double").coalesce(1)  # fmt: skip
    with pytest.raises(DataError, match=r"(?s)'features', row 1.*shape \(4,\).*length 3"):
        SparkModel(binary()).evaluate(df)
    rdd = spark.sparkContext.parallelize([(x[0], 1.0), (x[1], "yes")], 1)
    with pytest.raises(DataError, match=r"(?s)row 1: 'label .*numbers.*yes"):
        SparkModel(binary()).evaluate(rdd)


def test_a_failure_upstream_is_the_frames_own(spark: Any) -> None:
    def broken(_: Any) -> Any:
        raise KeyError("no such user")

    rdd = spark.sparkContext.parallelize([1], 1).map(broken)
    df = spark.createDataFrame(rdd, "features array<float>, label int")
    with pytest.raises(DataError, match=r"(?s)own expressions.*KeyError: 'no such user'"):
        SparkModel(binary()).evaluate(df)
