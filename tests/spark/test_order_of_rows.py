"""The order in which rows are trained: fixed by seed and rows, whatever order they arrive in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.ml import Pipeline
from pyspark.ml import feature as stages
from pyspark.ml.functions import vector_to_array
from pyspark.sql import Window
from pyspark.sql import functions as F
from spark_models import make_mlp

from sparkdl import SparkModel
from sparkdl.learner.signature import model_signature
from sparkdl.ml import KerasClassifier
from sparkdl.spark.forms.opening import RowChoice, open_fit_source
from sparkdl.spark.forms.sources import ROLE, Columns, dealt, drawn_in, partition_keys
from sparkdl.spark.runs.feeding import fed_frame


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


@pytest.fixture
def with_slots(spark: Any) -> Iterator[Any]:
    """Sets how many slots Spark believes to have when it cuts rows of the driver into parts."""
    name = "spark.sql.leafNodeDefaultParallelism"
    yield lambda slots: spark.conf.set(name, slots)
    spark.conf.unset(name)


def test_rows_of_the_driver_are_dealt_by_their_numbers(spark: Any, with_slots: Any) -> None:
    """Before, by the slots that there were at that moment, and so were those to validate on."""
    signature = model_signature(make_mlp())
    x = np.random.default_rng(0).normal(size=(500, 64)).astype("float32")
    y = np.arange(500) % 10
    table = pd.DataFrame({"features": list(x), "label": y})
    for data, validation in (((x, y), None), (table, None), (table, (x[:50], y[:50]))):
        found = []
        for slots in (1, 2, 7):
            with_slots(slots)
            split = 0.0 if validation else 0.25
            choice = RowChoice(signature, Columns(), validation, split, seed=5)
            source = open_fit_source(data, choice)
            assert ROLE in source.frame.columns
            parts = source.spread(3)[0].rdd.glom().collect()
            found.append([[tuple(row) for row in part] for part in parts])
            assert len({len(row) for part in found[0] for row in part}) == 1
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 2, sizes  # one of each role
            validated = sum(row[ROLE] for part in parts for row in part)
            assert validated == 50 if validation else 100 <= validated <= 150
        assert found[1] == found[0]
        assert found[2] == found[0]


def test_a_fit_of_arrays_is_the_same_with_more_slots(with_slots: Any, digits: Any) -> None:
    """To the bit, its validation too; before, other rows were held out."""
    x, y = (part[:400] for part in digits)
    table = pd.DataFrame({"features": list(x), "label": y})
    found = []
    for slots in (1, 5):
        with_slots(slots)
        spark_model = SparkModel(make_mlp(), "synchronous", num_workers=2, batch_size=32, seed=3)
        history = spark_model.fit(table, epochs=1, validation_split=0.3, verbose=0)
        found.append((history.history, spark_model.model.get_weights()))
    assert found[0][0]["val_loss"] == found[1][0]["val_loss"]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_first_ranks_are_fed_by_number(spark: Any, with_slots: Any) -> None:
    table, found = pd.DataFrame({"x": range(30)}), []
    for slots in (1, 5):
        with_slots(slots)
        frame, names = fed_frame(table, spark, deals=True)
        assert names == ("x",)
        parts = dealt(frame, 4, fed=3).rdd.glom().collect()
        found.append([[row.c0 for row in part] for part in parts])
    assert found[0] == [list(range(0, 30, 3)), list(range(1, 30, 3)), list(range(2, 30, 3)), []]
    assert found[1] == found[0]
    assert fed_frame(table, spark)[0].columns == ["c0"]


def test_keys_of_partitions_are_sparks(spark: Any) -> None:
    assert spark.range(1).select(F.hash(F.lit(1))).first()[0] == -559580957
    for count in (1, 2, 7, 100):
        frame = spark.createDataFrame([(key,) for key in partition_keys(count)], "key int")
        parts = frame.repartition(count, "key").rdd.glom().collect()
        assert [[row.key for row in part] for part in parts] == [[k] for k in partition_keys(count)]


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


@pytest.fixture(scope="module")
def strings(spark: Any) -> Any:
    """Cached rows with a string, numbers and gaps."""
    rows = [("abc"[n % 3], float(n), None if n % 5 == 0 else float(n % 7)) for n in range(60)]
    return spark.createDataFrame(rows, "name string, x double, gap double").cache()


def test_a_pipeline_of_indexer_and_network_warns_of_no_chance(strings: Any) -> None:
    network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
    network.compile("sgd", "sparse_categorical_crossentropy")
    pipeline = Pipeline(
        stages=[
            stages.StringIndexer(inputCol="name", outputCol="label"),
            stages.Imputer(inputCols=["gap"], outputCols=["filled"]),
            stages.Bucketizer(splits=[-1, 20, 99], inputCol="x", outputCol="part"),
            stages.VectorAssembler(inputCols=["filled", "part"], outputCol="features"),
            KerasClassifier(model=network, epochs=1, numWorkers=1, verbose=0),
        ]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*computed by chance")
        pipeline.fit(strings)


def test_what_gives_a_row_the_same_value_each_time_is_no_chance(strings: Any) -> None:
    window, same = Window.partitionBy("name").orderBy("x"), F.udf(lambda x: x, "double")
    vectors = stages.VectorAssembler(inputCols=["x"], outputCol="v").transform(strings)
    columns = [
        F.hash("x"), F.xxhash64("name"), F.lag("x").over(window), F.row_number().over(window),
        same("x"), F.current_date(), F.input_file_name(), F.monotonically_increasing_id(),
        F.spark_partition_id(),
    ]  # fmt: skip
    for column in columns:
        assert drawn_in(strings.select(column)) == [], column
    assert drawn_in(vectors.select(vector_to_array("v"))) == []
    assert drawn_in(strings.groupBy("name").agg(F.avg("x"))) == []
    assert drawn_in(strings.randomSplit([0.5, 0.5], seed=1)[0]) == []
    unread = strings.withColumn("drawn", F.rand())
    assert drawn_in(unread.select("x")) == []


def test_a_warning_names_the_expression_that_is_computed_by_chance(strings: Any) -> None:
    drawn = F.udf(lambda x: x, "double").asNondeterministic()
    placed = strings.repartition(3).select(F.monotonically_increasing_id())
    assert drawn_in(placed) == ["monotonically_increasing_id()"], "of rows that are dealt anew"
    assert drawn_in(strings.where(F.rand(5) < 0.5).select("x")) == ["rand(5)"]
    (udf,) = drawn_in(strings.select(drawn("x")))
    assert udf.startswith("<lambda>(x")
    noisy = strings.select(F.array(F.col("x") + F.randn(2)).alias("features"), "x")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.warns(RuntimeWarning, match=r"computed by chance \(randn\(2\)\)"):
        SparkModel(model, num_workers=1).fit(noisy, label="x", verbose=0)
