"""``fit(profile=True)`` names the cause that was planted."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import functions as F
from spark_models import make_mlp

from sparkdl import SparkModel

pytestmark = pytest.mark.slow  # causes by real times: for a machine that does nothing else


def make_wide(width: int = 16384) -> Any:
    """Many weights, few rows' work: exchanges cost more than steps."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


class SlowOnRank1(keras.losses.Loss):
    """A squared error that takes 20 ms more on one rank of two."""

    first_slow_rank = 1

    def call(self, y_true: Any, y_pred: Any) -> Any:
        import tensorflow as tf

        def wait(values: np.ndarray) -> np.ndarray:
            from pyspark import TaskContext

            context = TaskContext.get()
            if context is not None and context.partitionId() >= self.first_slow_rank:
                time.sleep(0.02)
            return values

        waited = tf.numpy_function(wait, [y_true], tf.float32)
        waited.set_shape(y_true.shape)
        return keras.ops.mean(keras.ops.square(waited - y_pred), axis=-1)


class SlowOnAllRanks(SlowOnRank1):
    """The same on all ranks: the steps take most of the time."""

    first_slow_rank = 0


def cause_of(spark_model: SparkModel) -> str | None:
    assert spark_model.profile is not None
    print(spark_model.profile)  # shown where the test fails
    advice = spark_model.profile.advice
    return None if advice is None else advice.cause


def test_exchanges_at_every_batch(digits_df: Any, capsys: Any) -> None:
    spark_model = SparkModel(make_wide(), num_workers=2, frequency="batch", batch_size=8)
    spark_model.fit(digits_df, epochs=2, verbose=0, profile=True)
    assert cause_of(spark_model) == "short window"
    assert "What would help most (short window)" in capsys.readouterr().out


def test_exchanges_over_http(digits_df: Any) -> None:
    spark_model = SparkModel(  # workers that do not wait would exchange beside the training
        make_wide(), "synchronous", num_workers=2, batch_size=8, parameter_server_mode="http"
    )
    spark_model.fit(digits_df, epochs=2, verbose=0)
    assert cause_of(spark_model) == "slow transport"


def test_one_row_per_batch(digits_df: Any) -> None:
    spark_model = SparkModel(make_mlp(), num_workers=2, batch_size=1, frequency=64)
    spark_model.fit(digits_df, epochs=1, verbose=0)
    assert cause_of(spark_model) == "small batches"


def test_rows_that_are_slow_to_come(spark: Any, digits_df: Any) -> None:
    def slowly(batches: Any) -> Any:
        for batch in batches:
            time.sleep(4.0)
            yield batch

    SparkModel(make_mlp(), num_workers=2).fit(digits_df, epochs=1, verbose=0)  # TensorFlow is up
    rows = digits_df.select("features", "label")
    slow = rows.mapInPandas(slowly, "features array<float>, label int")
    spark_model = SparkModel(make_mlp(), num_workers=2, repartition=False)
    spark_model.fit(slow, epochs=1, verbose=0, batch_size=128)
    assert cause_of(spark_model) == "slow reader"


@pytest.mark.parametrize(
    "mode", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.slow)]
)
def test_a_worker_that_is_slow(digits_df: Any, mode: str) -> None:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    model.compile("sgd", SlowOnRank1())
    spark_model = SparkModel(model, mode, num_workers=2)
    frame = digits_df.selectExpr("features", "cast(label as float) as label")
    spark_model.fit(frame, epochs=2, verbose=0)
    assert cause_of(spark_model) == "slow worker"


def test_a_worker_with_most_of_the_rows(digits_df: Any) -> None:
    # a union of frames of one partition each is one partition in newer versions of Spark
    frame = digits_df.repartitionByRange(2, F.expr("id >= 1600")).select("features", "label")
    assert frame.rdd.getNumPartitions() == 2
    frame = frame.selectExpr("features", "cast(label as float) as label")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    model.compile("sgd", SlowOnAllRanks())
    spark_model = SparkModel(model, "synchronous", num_workers=2, repartition=False)
    spark_model.fit(frame, epochs=2, verbose=0)
    assert cause_of(spark_model) == "uneven rows"
