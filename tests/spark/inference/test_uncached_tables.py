"""Every door to predictions on tables of files that Spark reads in column batches, not cached.

Spark 4.2 and newer hand these batches to functions on Arrow arrays; they have no place for vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl import SparkModel
from sparkdl.spark.inference.function import SETTING

N = 24
FORMATS = ("parquet", pytest.param("orc", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 3)).astype("float32")


@pytest.fixture(scope="module")
def model() -> Any:
    keras.utils.set_random_seed(4)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    made.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


@pytest.fixture(scope="module", params=FORMATS)
def table(spark: Any, x: np.ndarray, request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    """Vectors, dense and sparse, with numbers and arrays beside them; read from files each time."""
    from pyspark.ml.linalg import Vectors

    rows = [
        (i, Vectors.dense(row) if i % 2 else Vectors.sparse(3, [0, 1, 2], row), row, *row, i % 2)
        for i, row in enumerate(x.astype("float64").tolist())
    ]
    names = ["id", "vector", "array", "a", "b", "c", "label"]
    path = str(tmp_path_factory.mktemp("tables") / request.param)
    spark.createDataFrame(rows, names).coalesce(1).write.format(request.param).save(path)
    yield spark.read.format(request.param).load(path)
    spark.conf.unset(SETTING)


@pytest.mark.parametrize("features", ["vector", "array", ["a", "b", "c"]], ids=str)
def test_predict(table: Any, model: Any, x: np.ndarray, features: Any) -> None:
    rows = sparkdl.predict(model, table, features=features).collect()
    assert [row.id for row in rows] == list(range(N))
    np.testing.assert_allclose([r.prediction for r in rows], model.predict(x, verbose=0), atol=1e-6)
    np.testing.assert_allclose([r.array for r in rows], x, atol=1e-6)  # all columns are kept


def test_a_spark_model(table: Any, model: Any, x: np.ndarray) -> None:
    spark_model = SparkModel(model)
    scored = spark_model.predict(table, features="vector").select("prediction").collect()
    np.testing.assert_allclose([r[0] for r in scored], model.predict(x, verbose=0), atol=1e-6)
    got = spark_model.evaluate(table, features="vector")
    want = model.evaluate(x, np.arange(N) % 2, verbose=0, return_dict=True)
    assert got == pytest.approx(want, abs=1e-6)


def test_a_pipeline(table: Any, model: Any, x: np.ndarray) -> None:
    from pyspark.ml import PipelineModel

    from sparkdl.ml import KerasTransformer

    stage = KerasTransformer(model=model, inputCol="vector", outputCol="prediction")
    rows = PipelineModel([stage]).transform(table).collect()
    np.testing.assert_allclose([r.prediction for r in rows], model.predict(x, verbose=0), atol=1e-6)


def test_functions_of_columns_and_of_sql(spark: Any, table: Any, model: Any, x: np.ndarray) -> None:
    want = model.predict(x, verbose=0)
    spark.conf.unset(SETTING)
    function = sparkdl.predict_udf(model)
    for arguments in (["vector"], ["array"], ["a", "b", "c"]):
        rows = table.select("*", function(*arguments).alias("p")).collect()
        np.testing.assert_allclose([row.p for row in rows], want, atol=1e-6)
    spark.conf.unset(SETTING)
    sparkdl.register_udf(spark, "scored", model)
    table.createOrReplaceTempView("rows_of_files")
    rows = spark.sql("SELECT id, vector, scored(vector) AS p FROM rows_of_files").collect()
    np.testing.assert_allclose([row.p for row in rows], want, atol=1e-6)


def test_a_value_that_the_user_has_set_is_kept(spark: Any, model: Any) -> None:
    spark.conf.set(SETTING, "true")
    sparkdl.predict_udf(model)
    assert spark.conf.get(SETTING) == "true"
    spark.conf.unset(SETTING)


def test_a_function_of_the_users(table: Any, x: np.ndarray) -> None:
    def first(batches: Any) -> Any:
        for batch in batches:
            yield batch["a"]

    rows = sparkdl.inference(first, table, "first double").collect()
    np.testing.assert_allclose([row["first"] for row in rows], x[:, 0], atol=1e-6)


def test_a_stream(spark: Any, table: Any, model: Any, x: np.ndarray) -> None:
    (folder,) = {file.rpartition("/")[0] for file in table.inputFiles()}
    reader = spark.readStream.schema(table.schema).format(folder.rpartition("/")[2])
    scored = sparkdl.predict(model, reader.load(folder), features="vector")
    writer = scored.select("id", "prediction").writeStream.format("memory")
    writer.queryName("scored_files").trigger(availableNow=True).start().awaitTermination()
    rows = sorted(spark.table("scored_files").collect())
    np.testing.assert_allclose([r.prediction for r in rows], model.predict(x, verbose=0), atol=1e-6)
