"""The order in which rows are trained: fixed by seed and rows, whatever order they arrive in."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import functions as F
from spark_models import make_mlp

from sparkdl import SparkModel
from sparkdl.spark.forms.sources import dealt


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
def test_two_fits_with_one_seed_are_equal_to_the_bit(digits_df: Any, mode: str) -> None:
    """The rows come out of a shuffle, in another order each time, as they do after a join."""
    frame = digits_df.filter("id < 1000").repartition(7).repartition(5)
    weights = []
    for _ in range(3):
        spark_model = SparkModel(make_mlp(), mode, num_workers=2, batch_size=32, seed=3)
        spark_model.fit(frame, epochs=2, verbose=0)
        weights.append(spark_model.model.get_weights())
    for other in weights[1:]:
        for a, b in zip(weights[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def rows_of_partitions(frame: Any) -> list[list[int]]:
    return [[row.id for row in part] for part in frame.rdd.glom().collect()]


def test_the_rows_of_each_worker_are_fixed_and_as_many(spark: Any) -> None:
    """What the sort by content rests on: Spark sorts rows before it deals them in turn."""
    numbers = spark.range(0, 9000, 1, 7)
    joined = numbers.join(numbers.groupBy((F.col("id") % 50).alias("id")).count(), "id", "left")
    for frame in (numbers, joined.repartition(5)):
        found = [rows_of_partitions(dealt(frame, 3, in_order=False)) for _ in range(3)]
        for parts in found:
            assert [sorted(p) for p in parts] == [sorted(p) for p in found[0]]
            assert max(map(len, parts)) - min(map(len, parts)) <= 7  # as many as there are tasks


def test_without_shuffling_rows_keep_the_order_of_the_frame(spark: Any) -> None:
    numbers = spark.range(0, 5000, 1, 7)
    [alone] = rows_of_partitions(dealt(numbers, 1, in_order=True))
    assert alone == list(range(5000))
    parts = rows_of_partitions(dealt(numbers, 3, in_order=True))
    assert all(part == sorted(part) for part in parts)
    assert sorted(row for part in parts for row in part) == list(range(5000))


def test_one_worker_without_shuffling_is_plain_keras(spark: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(200, 3)).astype("float32")
    labels = rows.sum(axis=1, keepdims=True)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    alone = make()
    alone.fit(rows, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
    named = [(row.tolist(), float(label)) for row, label in zip(rows, labels[:, 0], strict=True)]
    frame = spark.createDataFrame(
        spark.sparkContext.parallelize(named, 5), "features array<float>, label float"
    )
    spark_model = SparkModel(make(), "synchronous", num_workers=1, batch_size=8)
    spark_model.fit(frame, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(alone.get_weights(), spark_model.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
