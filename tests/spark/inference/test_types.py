"""Integers from the column through a subclassed model into the column of predictions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from needed import needs_spark
from pyspark.errors import PySparkException

import sparkdl
from sparkdl import SparkModel
from sparkdl.errors import DataError
from sparkdl.spark.session.versions import spark_version

N = 16
IDS = np.random.default_rng(0).integers(2**24, 2**31 - 1, (N, 2)) | 1
Y = (IDS[:, 0] % 10 - 4.5).astype("float32")


class Rows(keras.Model):
    """Embeds the last digit of ids; floats above 2^24 have another one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.flat, self.last = layers.Embedding(10, 3), layers.Flatten(), layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.last(self.flat(self.rows(ops.cast(ids, "int64") % 10)))


class Next(keras.Model):
    def call(self, ids: Any) -> Any:
        return {"next": ids + 1, "odd": ids[:, 0] % 2 == 1}


def built(kind: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = kind()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model(IDS[:2])
    return model


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    rows = [(i, IDS[i].tolist(), float(Y[i])) for i in range(N)]
    return spark.createDataFrame(rows, "id int, features array<bigint>, label float").coalesce(1)


def test_a_fit_trains_the_rows_of_the_ids(spark: Any, df: Any) -> None:
    wanted = built(Rows)
    wanted.fit(IDS, Y, epochs=2, batch_size=N, verbose=0)
    pairs = spark.sparkContext.parallelize(list(zip(IDS, Y, strict=True)), 1)
    columns = df.selectExpr("features[0] a", "cast(features[1] as decimal(20, 0)) b", "label")
    for data, features in ((df, "features"), (pairs, "features"), (columns, ["a", "b"])):
        model = built(Rows)
        SparkModel(model, mode="synchronous", num_workers=1).fit(
            data, epochs=2, batch_size=N, verbose=0, features=features
        )
        for made, other in zip(model.get_weights(), wanted.get_weights(), strict=True):
            np.testing.assert_allclose(made, other, atol=1e-6)


def test_predictions_have_all_digits(df: Any) -> None:
    model = built(Next)
    rows = sparkdl.predict(model, df).orderBy("id")
    assert rows.dtypes[-2:] == [("prediction_next", "array<bigint>"), ("prediction_odd", "boolean")]
    assert [r.prediction_next for r in rows.collect()] == (IDS + 1).tolist()
    assert all(r.prediction_odd for r in rows.collect())
    function = sparkdl.predict_udf(model, output="next")
    assert [r.p for r in df.orderBy("id").select(function("features").alias("p")).collect()] == (
        IDS + 1
    ).tolist()


NEW_TYPES = {
    "variant": "parse_json('{\"a\": [1, null]}')",
    "time": "TIME '10:11:12.123456'",
    "months": "INTERVAL '1-2' YEAR TO MONTH",
    "seconds": "INTERVAL '1 02:03:04.5' DAY TO SECOND",
    "calendar": "make_interval(1, 2, 3, 4, 5, 6, 7.5)",
    "collated": "'Ab' COLLATE UTF8_LCASE",
    "twins": "named_struct('a', 1, 'a', 2)",
    "geometry": "ST_GeomFromWKB(X'0101000000000000000000F03F0000000000000040')",
    "geography": "ST_GeogFromWKB(X'0101000000000000000000F03F0000000000000040')",
}
"""Columns that a model does not read; a Spark may lack some."""


def shown(frame: Any, name: str) -> Any:
    texts = {"geometry": f"hex(ST_AsBinary({name}))", "geography": f"hex(ST_AsBinary({name}))"}
    return frame.selectExpr(texts.get(name, f"CAST({name} AS STRING)")).collect()[0][0]


@needs_spark(4, 1, "older ones pass all columns through Python")
def test_columns_of_new_types_pass_predict_unchanged(spark: Any, tmp_path: Any) -> None:
    spark.sql(f"CREATE TABLE fixed (c CHAR(5), v VARCHAR(5)) USING parquet LOCATION '{tmp_path}/t'")
    try:
        spark.sql("INSERT INTO fixed VALUES ('ab', 'cd')")
        frame = spark.table("fixed").selectExpr("array(1L, 2L) AS features", "c", "v")
        there = []
        for name, expression in NEW_TYPES.items():
            try:
                more = frame.selectExpr("*", f"{expression} AS {name}")
                shown(more, name)
            except PySparkException:
                continue
            frame = more
            there.append(name)
        assert {"variant", "months", "seconds", "calendar", "collated", "twins"} <= set(there)
        given = built(Next)
        passed = sparkdl.predict(given, frame)
        assert passed.schema.fields[: len(frame.columns)] == frame.schema.fields
        assert passed.select("c", "v").collect() == [("ab   ", "cd")]
        for name in there:
            assert shown(passed, name) == shown(frame, name)
    finally:
        spark.sql("DROP TABLE fixed")


OLDER = {
    **NEW_TYPES,
    "list": "array(INTERVAL '1' MONTH)",
    "inside": "named_struct('a', named_struct('b', 1, 'b', 2))",
    "values": "map(1, INTERVAL '1' YEAR)",
}


@pytest.mark.oldest
@pytest.mark.skipif(spark_version() >= (4, 1), reason="they pass")
def test_older_sparks_refuse_what_they_give_to_no_task(df: Any) -> None:
    model = built(Next)
    with pytest.raises(DataError, match="this PySpark lacks"):
        sparkdl.predict(model, df.selectExpr("*", f"{OLDER['calendar']} AS calendar"))
    for name in ("months", "twins", "list", "inside", "values"):
        with pytest.raises(DataError, match=f"{name!r} cannot pass predict"):
            sparkdl.predict(model, df.selectExpr("*", f"{OLDER[name]} AS {name}"))
    frame = df.selectExpr("*", f"{OLDER['seconds']} AS seconds")
    assert shown(sparkdl.predict(model, frame), "seconds") == shown(frame, "seconds")
