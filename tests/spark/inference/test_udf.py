"""Models as functions of DataFrame expressions and of SQL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

import sparkdl
from sparkdl.errors import ConfigError, DataError, UnknownNameError

N = 24


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 3)).astype("float32")


@pytest.fixture(scope="module")
def df(spark: Any, x: np.ndarray) -> Any:
    from pyspark.ml.linalg import Vectors

    rows = [(i, x[i].tolist(), *x[i].tolist(), Vectors.dense(x[i])) for i in range(N)]
    frame = spark.createDataFrame(rows, ["id", "features", "a", "b", "c", "vector"])
    return frame.coalesce(1).cache()  # each function of a query has a Python process per slot


class Noting(layers.Layer):
    """Writes a line with its process to a file when a process makes it."""

    def __init__(self, note: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.note = note
        with open(note, "a") as file:
            file.write(f"{os.getpid()}\n")

    def call(self, inputs: Any) -> Any:
        return inputs * 1.0

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "note": self.note}


def classifier(*before: Any) -> Any:
    keras.utils.set_random_seed(4)
    head = layers.Dense(2, activation="softmax", name="head")
    return keras.Sequential([keras.Input((3,)), *before, layers.Dense(4, name="embed"), head])


@pytest.mark.oldest
def test_arrays_vectors_and_numbers(df: Any, x: np.ndarray) -> None:
    model = classifier()
    want = model.predict(x, verbose=0)
    values = sparkdl.predict_udf(model, batch_size=5)
    most = sparkdl.predict_udf(model, returns="class")
    inside = sparkdl.predict_udf(model, layer="embed", dtype="float64")

    def got(column: Any) -> list[Any]:
        return [row[0] for row in df.select(column).collect()]

    for arguments in (["features"], ["a", "b", "c"], ["vector"]):
        np.testing.assert_allclose(got(values(*arguments)), want, atol=1e-6)
    assert got(most("features")) == want.argmax(1).tolist()
    hidden = keras.Model(model.inputs, model.get_layer("embed").output).predict(x, verbose=0)
    np.testing.assert_allclose(got(inside("features")), hidden, atol=1e-6)


def test_sql_and_one_model_per_worker(spark: Any, df: Any, x: np.ndarray, tmp_path: Path) -> None:
    note = tmp_path / "made"
    model = classifier(Noting(str(note)))
    want = model.predict(x, verbose=0)[:, 1]
    note.unlink()
    df.createOrReplaceTempView("customers")
    sparkdl.register_udf(spark, "churn", model, returns="probability")
    query = "SELECT id, churn(features)[1] AS p FROM customers WHERE churn(a, b, c)[0] < 2"
    for _ in range(2):
        rows = sorted(spark.sql(query).collect())
        np.testing.assert_allclose([row.p for row in rows], want, atol=1e-6)
    made = note.read_text().split()
    assert made
    assert len(made) == len(set(made))  # once per process, however often the function is called
    other = classifier()
    other.set_weights([-w for w in other.get_weights()])
    again = sparkdl.register_udf(spark, "churn", other)
    rows = sorted(spark.sql("SELECT id, churn(features) AS p FROM customers").collect())
    np.testing.assert_allclose([row.p for row in rows], other.predict(x, verbose=0), atol=1e-6)
    assert sorted(df.select("id", again("features").alias("p")).collect()) == rows


def test_several_inputs_nulls_and_no_rows(spark: Any, df: Any, x: np.ndarray) -> None:
    left, right = keras.Input((3,), name="left"), keras.Input((1,), name="right")
    model = keras.Model([left, right], layers.Dense(1)(layers.Concatenate()([left, right])))
    want = model.predict([x, x[:, :1]], verbose=0)[:, 0]
    both = sparkdl.predict_udf(model)
    rows = df.select("id", both("features", "a").alias("p")).orderBy("id").collect()
    np.testing.assert_allclose([row.p for row in rows], want, atol=1e-6)
    with pytest.raises(Exception, match=r"(?s)wrong number of arguments.*2 columns.*received: 1"):
        df.select(both("features")).collect()
    with pytest.raises(
        AnalysisException, match=r"input 'left'.*shape \(3,\).*'left' \(3,\), 'righ"
    ):
        df.select(both("a", "features"))  # no job
    assert df.where("id < 0").select(both("features", "a")).collect() == []
    holes = spark.createDataFrame([(0, [1.0, 2.0, 3.0]), (1, None)], "id int, f array<float>")
    keep = sparkdl.predict_udf(classifier(), handle_invalid="keep")
    rows = holes.coalesce(1).select("id", keep("f").alias("p")).orderBy("id").collect()
    assert [row.p is None for row in rows] == [False, True]
    with pytest.raises(Exception, match="no nulls"):
        holes.select(sparkdl.predict_udf(classifier())("f")).collect()


def test_inputs_by_name_or_in_the_order_of_the_maker(spark: Any) -> None:
    zebra, ant = keras.Input((), name="zebra"), keras.Input((2,), name="ant")
    out = 10 * zebra + keras.ops.sum(ant, -1)
    model = keras.Model({"zebra": zebra, "ant": ant}, out)
    df = spark.createDataFrame([(1.0, [2.0, 3.0])], "z float, a array<float>").coalesce(1)
    df.createOrReplaceTempView("animals")
    want = model.predict({"zebra": np.ones(1), "ant": np.array([[2.0, 3.0]])}, verbose=0)[0]
    function = sparkdl.register_udf(spark, "animal", model)
    named = F.struct(F.col("a").alias("ant"), F.col("z").alias("zebra"))
    calls = [function("z", "a"), function(ant="a", zebra=F.col("z")), function(named)]
    texts = ["animal(z, a)", "animal(named_struct('ant', a, 'zebra', z))"]
    row = df.select(*calls, *map(F.expr, texts)).first()
    assert list(row) == [want] * 5 == [15.0] * 5
    with pytest.raises(
        AnalysisException, match=r"input 'zebra'.*a number.*'zebra' \(\), 'ant' \(2,\)"
    ):
        df.select(function("a", "z"))
    with pytest.raises(
        DataError, match=r"(?s)a column for each of \['zebra', 'ant'\].*named_struct"
    ):
        function(ant="a", zebr="z")
    orders = "(?s)cannot be input 'zebra'.*a number.*in this order: 'zebra' \\(\\), 'ant'"
    with pytest.raises(Exception, match=orders):
        spark.sql("SELECT animal(a, z) FROM animals").collect()
    with pytest.raises(Exception, match=r"(?s)struct of other fields.*\['zebra', 'ant'\]"):
        spark.sql("SELECT animal(named_struct('zebra', z, 'ants', a)) FROM animals").collect()
    pair = keras.Model([zebra, ant], out)
    assert df.select(sparkdl.predict_udf(pair)("z", "a")).first()[0] == want


def test_what_no_function_can_be(spark: Any) -> None:
    model = classifier()
    with pytest.raises(UnknownNameError, match="did you mean 'probability'"):
        sparkdl.predict_udf(model, returns="probabilities")
    with pytest.raises(ConfigError, match="'error' or 'keep'"):
        sparkdl.predict_udf(model, handle_invalid="skip")
    with pytest.raises(ConfigError, match="letters, digits"):
        sparkdl.register_udf(spark, "my model", model)
    with pytest.raises(ConfigError, match="no other form"):
        sparkdl.predict_udf(model, layer="embed", returns="class")
    given = keras.Input((3,))
    two = keras.Model(
        given, [layers.Dense(1, name="one")(given), layers.Dense(1, name="two")(given)]
    )
    with pytest.raises(ConfigError, match="2 outputs, and a function returns one"):
        sparkdl.predict_udf(two)
