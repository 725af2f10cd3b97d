"""KerasRegressor, KerasEstimator of several inputs and outputs, KerasTransformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel
from stage_cases import X, builder, quick, table

from sparkdl.errors import ModelError, UnknownNameError
from sparkdl.ml import KerasEstimator, KerasModel, KerasRegressor, KerasTransformer


def line(outputs: int = 1) -> Any:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(outputs)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_a_regressor_in_a_validator(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    frame = table(spark).withColumn("label", F.expr("2 * a - b + 0.5"))
    regressor = KerasRegressor(model=line(), numWorkers=2, batchSize=16)
    grid = ParamGridBuilder().addGrid(regressor.epochs, [1, 8]).build()
    split = TrainValidationSplit(
        estimator=regressor, estimatorParamMaps=grid, evaluator=RegressionEvaluator(), seed=1
    )
    tuned = split.fit(frame)
    assert tuned.validationMetrics[1] < tuned.validationMetrics[0]
    scored = tuned.transform(frame)
    assert dict(scored.dtypes)["prediction"] == "double"
    assert RegressionEvaluator(metricName="r2").evaluate(scored) > 0.95
    best = tuned.bestModel
    rows = scored.orderBy("id").select("prediction").collect()
    want = best.model.predict(X, verbose=0)[:, 0]
    np.testing.assert_allclose([row.prediction for row in rows], want, atol=1e-6)
    assert best.predict(X[3]) == pytest.approx(want[3], abs=1e-6)
    assert not hasattr(best, "epochs")  # a grid over training must not reach inference
    tuned.write().overwrite().save(f"{tmp_path}/tuned")
    loaded = TrainValidationSplitModel.load(f"{tmp_path}/tuned")
    assert loaded.transform(frame).orderBy("id").select("prediction").collect() == rows
    with pytest.raises(ModelError, match="one number per row"):
        KerasRegressor(model=line(2)).fit(frame)


def forked() -> Any:
    keras.utils.set_random_seed(4)
    wide, deep = keras.Input((2,), name="wide"), keras.Input((4,), name="deep")
    joined = keras.layers.Concatenate()([wide, deep])
    price = keras.layers.Dense(1, name="price")(joined)
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(joined)
    model = keras.Model([wide, deep], [price, kind])
    model.compile("adam", {"price": "mse", "kind": "sparse_categorical_crossentropy"})
    return model


def test_several_inputs_and_outputs(spark: Any, tmp_path: Path) -> None:
    frame = table(spark)
    estimator = KerasEstimator(
        model=forked(), featuresCol={"wide": ["a", "b"], "deep": "features"},
        labelCol={"price": "c", "kind": "label"}, weightCols={"kind": "weight"}, numWorkers=2,
    )  # fmt: skip
    fitted = estimator.fit(frame)
    scored = fitted.transform(frame)
    assert dict(scored.dtypes)["prediction_price"] == "float"
    assert dict(scored.dtypes)["prediction_kind"] == "array<float>"
    price, kind = fitted.model.predict({"wide": X[:, :2], "deep": X}, verbose=0)
    rows = scored.orderBy("id").select("prediction_price", "prediction_kind").collect()
    np.testing.assert_allclose([r[0] for r in rows], price[:, 0], atol=1e-6)
    np.testing.assert_allclose([r[1] for r in rows], kind, atol=1e-6)
    fitted.save(f"{tmp_path}/m")
    one = KerasModel.load(f"{tmp_path}/m").setOutputCols({"kind": "k"}).setOutputMode("vector")
    named = one.transform(frame)
    assert named.schema == one.transformSchema(frame.schema)
    assert named.columns == [*frame.columns, "k"]
    assert dict(named.dtypes)["k"] == "vector"
    with pytest.raises(UnknownNameError, match="did you mean 'kind'"):
        one.setOutputCols({"kinds": "k"}).transform(frame)


def test_a_transformer_needs_no_training(spark: Any, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    want = model.predict(X, verbose=0)
    model.save(tmp_path / "m.keras")
    for transformer in (
        KerasTransformer(model=model, inputCol=["a", "b", "c", "d"], outputCol="p"),
        KerasTransformer(modelFile=f"{tmp_path}/m.keras", inputCol="features", outputCol="p"),
    ):
        rows = transformer.transform(table(spark)).orderBy("id").select("p").collect()
        np.testing.assert_allclose([row.p for row in rows], want, atol=1e-6)
    assert not transformer.hasSummary
    assert transformer.history == {}
    with pytest.raises(ModelError, match="no summary"):
        transformer.summary  # noqa: B018


def test_rows_that_no_model_can_take(spark: Any) -> None:
    from pyspark.sql import functions as F

    frame = table(spark, "array").withColumn("features", F.when(F.col("id") > 3, F.col("features")))
    fitted = quick(epochs=1, model=builder()).fit(frame.where("id > 3"))
    kept = fitted.setHandleInvalid("keep").transform(frame).where("id < 6").orderBy("id").collect()
    assert [row.prediction is None for row in kept] == [True] * 4 + [False] * 2
    assert fitted.setHandleInvalid("skip").transform(frame).count() == frame.count() - 4
