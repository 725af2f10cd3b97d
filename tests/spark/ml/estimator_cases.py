"""What each kind of stage must do wherever Spark runs; see stage_cases.py, which runs these too.

Classifiers with one unit, thresholds and what is refused; regressors in a validator, models of
several inputs and outputs, transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import BinaryClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel
from pyspark.sql import functions as F
from stage_tables import ROWS, X, Y, builder, quick, table

from sparkdl.errors import ConfigError, DataError, ModelError, UnknownNameError
from sparkdl.ml import KerasEstimator, KerasModel, KerasRegressor, KerasTransformer
from sparkdl.spark.session.running import is_connect


def case_two_classes_with_one_unit(spark: Any, folder: Path) -> None:
    for last in ("sigmoid", None):
        _two_classes(spark, last)


def _two_classes(spark: Any, last: str | None) -> None:
    model = builder(classes=1, last="sigmoid")
    if last is None:
        model = builder(classes=1, last=None)
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    frame = table(spark).withColumn("label", (F.col("label") == 0).cast("double"))
    fitted = quick(model=model, epochs=3).fit(frame)
    scored = fitted.transform(frame)
    rows = scored.orderBy("id").select("prediction", "probability", "rawPrediction").collect()
    out = fitted.model.predict(X, verbose=0).astype("float64")[:, 0]
    p = 1 / (1 + np.exp(-out)) if last is None else out
    z = out if last is None else np.log(p / (1 - p))
    got = np.stack([row.probability.toArray() for row in rows])
    np.testing.assert_allclose(got, np.stack([1 - p, p], 1), atol=1e-6)
    raw = np.stack([row.rawPrediction.toArray() for row in rows])
    np.testing.assert_allclose(raw, np.stack([-z, z], 1), atol=1e-4)
    assert fitted.numClasses == 2
    auc = BinaryClassificationEvaluator().evaluate(scored)
    ranks = np.argsort(np.argsort(p)) + 1
    positive = Y == 0
    count = positive.sum()
    want = (ranks[positive].sum() - count * (count + 1) / 2) / (count * (ROWS - count))
    assert auc == pytest.approx(want, abs=1e-6)


def case_thresholds_move_the_prediction(spark: Any, folder: Path) -> None:
    frame = table(spark)
    fitted = quick(epochs=1).fit(frame)
    p = fitted.model.predict(X, verbose=0)
    thresholds = [0.9, 0.05, 0.6]
    fitted.setThresholds(thresholds)
    rows = fitted.transform(frame).orderBy("id").select("prediction").collect()
    assert [row.prediction for row in rows] == (p / thresholds).argmax(1).tolist()
    always = fitted.transform(frame, {fitted.thresholds: [1.0, 0.0, 1.0]})
    assert {row.prediction for row in always.select("prediction").collect()} == {1.0}
    for wrong in ([0.5, 0.5], [0.5, -0.1, 0.5], [0.0, 0.0, 1.0]):
        with pytest.raises(ConfigError, match=r"(?s)3 numbers >= 0, one per class"):
            fitted.setThresholds(wrong).transform(frame)
        with pytest.raises(ConfigError, match=r"(?s)3 numbers >= 0, one per class"):
            quick(thresholds=wrong).fit(frame)


def case_what_is_refused_before_a_job(spark: Any, folder: Path) -> None:
    frame = table(spark)
    jobs: Callable[[], int] = lambda: 0  # noqa: E731 - Connect does not count them
    if not is_connect(spark):
        jobs = spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs
    words = frame.withColumn("word", frame["id"].cast("string"))
    indexed = StringIndexer(inputCol="word", outputCol="many").fit(words).transform(words)
    two = keras.Input((4,))
    forked = keras.Model(two, [keras.layers.Dense(3)(two), keras.layers.Dense(1)(two)])
    forked.compile("adam", ["sparse_categorical_crossentropy", "mse"])
    number = builder(classes=1, last=None)
    number.compile("adam", "mse")
    before = jobs()
    for estimator, data, error, text in (
        (quick(), frame.drop("features"), DataError, "'features'"),
        (quick(labelCol="labels"), frame, DataError, "did you mean 'label'"),
        (quick(labelCol="many"), indexed, DataError, "240"),
        (quick(labelCol="word"), words, DataError, "StringIndexer"),
        (quick(weightCol="heavy"), frame, DataError, "'heavy'"),
        (quick(validationIndicatorCol="id"), frame, DataError, "a column of type int"),
        (quick(validationIndicatorCol="held"), frame, DataError, "no such column"),
        (quick(validationIndicatorCol="is_validation", validationSplit=0.1), frame, ConfigError,
         "one of them"),
        (quick(model=forked), frame, ModelError, "KerasEstimator"),
        (quick(model=number), frame, ModelError, "KerasRegressor"),
        (quick(model=None), frame, ConfigError, "has no model"),
    ):  # fmt: skip
        with pytest.raises(error, match=r"(?s)expected: .*received: ") as caught:
            estimator.fit(data)
        assert text in str(caught.value)
    assert jobs() == before


def case_a_label_that_is_no_class(spark: Any, folder: Path) -> None:
    frame = table(spark)
    four_beats = (
        r"(?s)label out of range.*expected: integers from 0 to 2.*received: .*hint: labels "
    )
    for wrong in ("id * 1.0D", "-1.0D", "label + 0.5D"):
        with pytest.raises(DataError, match=four_beats):
            quick().fit(frame.withColumn("label", F.expr(wrong)))


def case_columns_that_exist_are_not_overwritten(spark: Any, folder: Path) -> None:
    frame = table(spark)
    fitted = quick(epochs=1).fit(frame)
    once = fitted.transform(frame)
    with pytest.raises(DataError, match="already have a column 'prediction'"):
        fitted.transform(once)
    with pytest.raises(DataError, match="already have a column 'prediction'"):
        fitted.transformSchema(once.schema)
    again = fitted.copy().setPredictionCol("p.2").setProbabilityCol("").setRawPredictionCol("")
    assert again.transform(once).columns == [*once.columns, "p.2"]


def line(outputs: int = 1) -> Any:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(outputs)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def case_a_regressor_in_a_validator(spark: Any, folder: Path) -> None:
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
    tuned.write().overwrite().save(f"{folder}/tuned")
    loaded = TrainValidationSplitModel.load(f"{folder}/tuned")
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


def case_several_inputs_and_outputs(spark: Any, folder: Path) -> None:
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
    fitted.save(f"{folder}/m")
    one = KerasModel.load(f"{folder}/m").setOutputCols({"kind": "k"}).setOutputMode("vector")
    named = one.transform(frame)
    assert named.schema == one.transformSchema(frame.schema)
    assert named.columns == [*frame.columns, "k"]
    assert dict(named.dtypes)["k"] == "vector"
    with pytest.raises(UnknownNameError, match="did you mean 'kind'"):
        one.setOutputCols({"kinds": "k"}).transform(frame)


def case_a_transformer_needs_no_training(spark: Any, folder: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    want = model.predict(X, verbose=0)
    model.save(folder / "m.keras")
    for transformer in (
        KerasTransformer(model=model, inputCol=["a", "b", "c", "d"], outputCol="p"),
        KerasTransformer(modelFile=f"{folder}/m.keras", inputCol="features", outputCol="p"),
    ):
        rows = transformer.transform(table(spark)).orderBy("id").select("p").collect()
        np.testing.assert_allclose([row.p for row in rows], want, atol=1e-6)
    assert not transformer.hasSummary
    assert transformer.history == {}
    with pytest.raises(ModelError, match="no summary"):
        transformer.summary  # noqa: B018


def case_rows_that_no_model_can_take(spark: Any, folder: Path) -> None:
    frame = table(spark, "array").withColumn("features", F.when(F.col("id") > 3, F.col("features")))
    fitted = quick(epochs=1, model=builder()).fit(frame.where("id > 3"))
    kept = fitted.setHandleInvalid("keep").transform(frame).where("id < 6").orderBy("id").collect()
    assert [row.prediction is None for row in kept] == [True] * 4 + [False] * 2
    assert fitted.setHandleInvalid("skip").transform(frame).count() == frame.count() - 4


CASES = {name: case for name, case in globals().items() if name.startswith("case_")}
