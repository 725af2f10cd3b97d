"""predict: every row in its place with all it had, batch by batch, and only when asked."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from keras import layers

import sparkdl
from sparkdl import SparkModel
from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.process import payload
from sparkdl.spark.executor.stage import run_task
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import PredictRowsTask, PredictTask, predict_rows

N = 53


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 3)).astype("float32")


def dense(outputs: int = 1, inputs: int = 3) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((inputs,)), layers.Dense(outputs)])
    model.compile("sgd", "mse")
    return model


def jobs(spark: Any) -> int:
    """How many jobs Spark has started so far."""
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


@pytest.mark.oldest
def test_all_columns_and_the_order_of_rows_are_kept(spark: Any, x: np.ndarray) -> None:
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import types as T

    when = datetime.datetime(2024, 2, 29, 12, 30, 1, 5)
    rows = [
        (
            i,
            Vectors.dense(x[i].tolist()) if i % 2 else Vectors.sparse(3, [0, 1, 2], x[i].tolist()),
            f"näme {i}" if i % 3 else None, when + datetime.timedelta(hours=i) if i % 5 else None,
            Decimal(i) / 4, (i, (None, [f"{i}"])), {"key": i}, bytearray([i]), when.date(),
            None, x[i].tolist(),
        )
        for i in range(N)
    ]  # fmt: skip
    from pyspark.ml.linalg import VectorUDT

    schema = T.StructType([
        T.StructField("id.of row", T.LongType(), False),
        T.StructField("features", VectorUDT(), True, {"ml_attr": {"num_attrs": 3}}),
        T.StructField("text", T.StringType()),
        T.StructField("time", T.TimestampType()),
        T.StructField("price", T.DecimalType(12, 3)),
        T.StructField("nested", T.StructType([
            T.StructField("a", T.IntegerType()),
            T.StructField("b", T.StructType([
                T.StructField("c", T.DoubleType()),
                T.StructField("d", T.ArrayType(T.StringType())),
            ])),
        ])),
        T.StructField("map", T.MapType(T.StringType(), T.IntegerType())),
        T.StructField("ti`ck", T.BinaryType()),
        T.StructField("day", T.DateType()),
        T.StructField("void", T.DoubleType()),
        T.StructField("text", T.ArrayType(T.FloatType())),
    ])  # fmt: skip
    cut = [rows[:20], [], rows[20:21], rows[21:]]
    rdd = spark.sparkContext.parallelize(cut, 4).flatMap(lambda part: part)
    df = spark.createDataFrame(rdd, schema)
    model = dense()
    before = jobs(spark)
    predicted = SparkModel(model, batch_size=8).predict(df)
    assert jobs(spark) == before, "predict must be lazy"
    assert predicted.columns == [*df.columns, "prediction"]
    assert [f.dataType for f in predicted.schema.fields[:-1]] == [
        f.dataType for f in df.schema.fields
    ]
    assert predicted.schema["features"].metadata == {"ml_attr": {"num_attrs": 3}}
    assert predicted.schema["prediction"].dataType == T.FloatType()
    assert predicted.rdd.getNumPartitions() == 4
    got = predicted.collect()
    assert [tuple(r)[:-1] for r in got] == [tuple(r) for r in df.collect()]
    np.testing.assert_allclose(
        [r.prediction for r in got], model.predict(x, verbose=0)[:, 0], atol=1e-5
    )


def test_shapes_of_outputs(spark: Any, x: np.ndarray) -> None:
    from pyspark.sql import types as T

    given = keras.Input((3,), name="given")
    image = layers.Reshape((2, 2, 1), name="image")(layers.Dense(4)(given))
    model = keras.Model(given, [layers.Dense(1, name="one")(given),
                                layers.Dense(2, name="two")(given), image])  # fmt: skip
    model.compile("sgd", "mse")
    df = spark.createDataFrame([(row.tolist(),) for row in x], "`my.x` array<double>").coalesce(1)
    predicted = SparkModel(model).predict(df, features="my.x", output_column="p")
    assert predicted.columns == ["my.x", "p_one", "p_two", "p_image"]
    real = T.FloatType()
    kinds = [f.dataType for f in predicted.schema.fields[1:]]
    nested = T.ArrayType(T.ArrayType(T.ArrayType(real)))
    assert kinds == [real, T.ArrayType(real), nested]
    got, want = predicted.collect(), model.predict(x, verbose=0)
    for name, values in zip(("p_one", "p_two", "p_image"), want, strict=True):
        values = values[:, 0] if name == "p_one" else values
        np.testing.assert_allclose([r[name] for r in got], values, atol=1e-5)


def test_prediction_goes_on_in_spark(spark: Any, x: np.ndarray) -> None:
    """Filters, joins and a second model work on the result; a trained model needs no new name."""
    df = spark.createDataFrame([(i, x[i].tolist()) for i in range(N)], "id int, f array<float>")
    model = dense(2)
    both = SparkModel(dense()).predict(
        SparkModel(model).predict(df.coalesce(1), features="f", output_column="first.one"),
        features="f", output_column="second",
    )  # fmt: skip
    got = both.where("id % 2 = 0").select("id", "`first.one`", "second").orderBy("id").collect()
    want = model.predict(x, verbose=0)[::2]
    np.testing.assert_allclose([r[1] for r in got], want, atol=1e-5)


def test_an_existing_column_is_not_overwritten(spark: Any, x: np.ndarray) -> None:
    df = spark.createDataFrame([(x[0].tolist(), 1.0)], "features array<float>, Prediction double")
    with pytest.raises(DataError, match=r"(?s)already have a column 'prediction'.*output_column"):
        SparkModel(dense()).predict(df)
    with pytest.raises(DataError, match=r"(?s)'feature'.*did you mean 'features'"):
        SparkModel(dense()).predict(df, features="feature")
    with pytest.raises(ConfigError, match="batch_size"):
        SparkModel(dense()).predict(df, batch_size=0)


def test_no_rows(spark: Any) -> None:
    df = spark.createDataFrame([], "features array<float>, id int")
    predicted = SparkModel(dense()).predict(df)
    assert predicted.collect() == []
    assert predicted.columns == ["features", "id", "prediction"]


def test_wrong_rows_are_named(spark: Any) -> None:
    df = spark.createDataFrame([([1.0, 2.0],)], "features array<float>").coalesce(1)
    with pytest.raises(Exception, match=r"(?s)DataError.*'features'.*shape \(3,\)"):
        SparkModel(dense()).predict(df).collect()


# -- RDD and NumPy ------------------------------------------------------------------------------


def test_rdds_keep_their_order(spark: Any, x: np.ndarray) -> None:
    from pyspark.mllib.linalg import Vectors
    from pyspark.mllib.regression import LabeledPoint

    model = SparkModel(dense(2), batch_size=7)
    want = model.model.predict(x, verbose=0)
    kinds = [lambda v: v, lambda v: v.tolist(), lambda v: (v, 1.0), lambda v: Vectors.dense(v),
             lambda v: LabeledPoint(0, v)]  # fmt: skip
    elements = [kinds[i % 5](x[i]) for i in range(N)]
    rdd = spark.sparkContext.parallelize(elements, 3)
    before = jobs(spark)
    predicted = model.predict(rdd)
    assert jobs(spark) == before
    got = predicted.collect()
    assert all(isinstance(v, np.ndarray) and v.shape == (2,) for v in got)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_numpy(x: np.ndarray) -> None:
    model = dense(2)
    np.testing.assert_array_equal(
        SparkModel(model).predict(x, batch_size=7), model.predict(x, batch_size=7, verbose=0)
    )


def test_frames_of_other_libraries_are_read_by_name(spark: Any, x: np.ndarray) -> None:
    """Columns in another order, and one more than the model reads."""
    import pandas as pd
    import polars as pl

    model = dense(2)
    want = model.predict(x, verbose=0)
    columns = {"id": np.arange(N), "c": x[:, 2], "a": x[:, 0], "b": x[:, 1]}
    frames = [pd.DataFrame(columns), pl.DataFrame(columns), pa.table(columns)]
    for data, predict in zip(frames, [SparkModel(model).predict] * 2 + [scored], strict=True):
        predicted = predict(data, features=["a", "b", "c"])
        assert predicted.columns == ["id", "c", "a", "b", "prediction"]
        rows = sorted(predicted.select("id", "prediction").collect())
        np.testing.assert_allclose([row.prediction for row in rows], want, atol=1e-5)


def scored(data: Any, features: list[str]) -> Any:
    return sparkdl.predict(dense(2), data, features=features)


def test_lists(x: np.ndarray) -> None:
    model = dense(2)
    want = model.predict(x, verbose=0)
    np.testing.assert_allclose(SparkModel(model).predict(x.tolist()), want, atol=1e-6)
    np.testing.assert_allclose(SparkModel(model).predict([x]), want, atol=1e-6)
    with pytest.raises(ConfigError, match="predict cannot read"):
        SparkModel(model).predict([[1.0, 2.0, 3.0], [1.0]])


def test_arrays_are_checked_before_keras_has_them(x: np.ndarray) -> None:
    spark_model = SparkModel(dense(2))
    for empty in (x[:0], {"features": x[:0]}):
        assert spark_model.predict(empty).shape == (0, 2)
    left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
    both = layers.Concatenate()([left, right])
    several = keras.Model([left, right], [layers.Dense(1)(both), layers.Dense(4)(both)])
    shapes = [p.shape for p in sparkdl.predict(several, {"left": x[:0], "right": x[:0, :2]})]
    assert shapes == [(0, 1), (0, 4)]
    for wrong in (x[:, :2], x[0], x.astype(object), [], {"left": x, "right": x}):
        with pytest.raises(DataError):
            spark_model.predict(wrong)
    with pytest.raises(DataError, match="'left', 'right'"):
        sparkdl.predict(several, x)


# -- in batches ---------------------------------------------------------------------------------


def task(model: Any, batch_size: int, rows: bool = False) -> bytes:
    source = KerasSource(model)
    (output,) = source.signature.outputs
    archive = source.encode([output])
    spec = DataSpec({"features": ColumnSpec(("features",), (3,))})
    if rows:
        return payload.dump(PredictRowsTask(archive, spec, batch_size, False))
    return payload.dump(PredictTask(archive, spec, batch_size, False, (OutputColumn("p", output),)))


def test_a_partition_is_never_in_memory_as_a_whole(x: np.ndarray) -> None:
    """No more than one Arrow batch is read ahead of the rows that are handed on."""
    model = dense(2)
    taken: list[int] = []

    def batches() -> Any:
        for number in range(3):
            taken.append(number)
            part = x[number * 10 : number * 10 + 10 - number]
            yield pa.RecordBatch.from_arrays(
                [pa.array(part.tolist(), pa.list_(pa.float32()))], names=["c0"]
            )

    out = run_task(batches(), task(model, batch_size=4))
    given = [*range(10), *range(10, 19), *range(20, 28)]
    want = model.predict(x, verbose=0)[given]
    got: list[Any] = []
    for number, done in enumerate((8, 16, 27)):
        result = next(out)
        assert taken == list(range(min(number + 1, 2) + 1))
        got += [row["c0"] for row in result.column(0).to_pylist()]
        assert len(got) == done
    assert list(out) == []
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_rows_of_an_rdd_are_taken_a_batch_at_a_time(x: np.ndarray) -> None:
    model = dense(2)
    taken: list[int] = []

    def rows() -> Any:
        for number, row in enumerate(x):
            taken.append(number)
            yield row

    out = predict_rows(rows(), task(model, batch_size=4, rows=True))
    next(out)
    assert len(taken) == 4
    for _ in range(4):
        next(out)
    assert len(taken) == 8
