"""KerasClassifier: digits in a pipeline, two classes with one unit, logits, thresholds, errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
)
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from stage_cases import ROWS, X, Y, builder, quick, table

from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.ml import KerasClassifier

ROOT = Path(__file__).resolve().parents[3]

LOADS = """
import sys
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession

path, data = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
model = PipelineModel.load(path)
scored = model.transform(spark.read.parquet(data))
print("accuracy", MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored))
assert int(model.stages[-1].model.optimizer.iterations) > 0
spark.stop()
"""


def digits_model() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_digits_in_a_pipeline_loaded_in_a_fresh_process(
    spark: Any, digits: Any, tmp_path: Path
) -> None:
    x, y = digits
    names = [f"pixel {i}" for i in range(64)]
    rows = [(*map(float, x[i]), float(y[i])) for i in range(len(x))]
    frame = spark.createDataFrame(rows, [*names, "label"])
    train, test = frame.randomSplit([0.8, 0.2], seed=1)
    pipeline = Pipeline(
        stages=[
            VectorAssembler(inputCols=names, outputCol="joined"),
            StandardScaler(inputCol="joined", outputCol="scaled", withMean=True),
            KerasClassifier(model=digits_model(), featuresCol="scaled", epochs=20, numWorkers=2),
        ]
    )
    model = pipeline.fit(train)
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    accuracy = evaluator.evaluate(model.transform(test))
    assert accuracy >= 0.95
    model.write().overwrite().save(f"{tmp_path}/model")
    test.write.parquet(f"{tmp_path}/test")
    done = subprocess.run(
        [sys.executable, "-c", LOADS, f"{tmp_path}/model", f"{tmp_path}/test"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.parametrize("last", ["sigmoid", None])
def test_two_classes_with_one_unit(spark: Any, last: str | None) -> None:
    model = builder(classes=1, last="sigmoid")
    if last is None:
        model = builder(classes=1, last=None)
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    from pyspark.sql import functions as F

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


def test_thresholds_move_the_prediction(spark: Any) -> None:
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


def test_what_is_refused_before_a_job(spark: Any) -> None:
    frame = table(spark)
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


def test_a_label_that_is_no_class(spark: Any) -> None:
    frame = table(spark)
    frame = frame.withColumn("label", frame["id"] * 1.0)
    with pytest.raises(DataError, match="class"):
        quick().fit(frame)


def test_columns_that_exist_are_not_overwritten(spark: Any) -> None:
    frame = table(spark)
    fitted = quick(epochs=1).fit(frame)
    once = fitted.transform(frame)
    with pytest.raises(DataError, match="already have a column 'prediction'"):
        fitted.transform(once)
    with pytest.raises(DataError, match="already have a column 'prediction'"):
        fitted.transformSchema(once.schema)
    again = fitted.copy().setPredictionCol("p.2").setProbabilityCol("").setRawPredictionCol("")
    assert again.transform(once).columns == [*once.columns, "p.2"]


def test_a_losses_own_logits(spark: Any) -> None:
    def my_loss(y: Any, z: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y, z, from_logits=True)

    frame = table(spark)
    estimator = quick(model=None, modelBuilder=lambda: builder(last=None), loss=my_loss)
    with pytest.raises(ModelError, match="fromLogits"):
        estimator.fit(frame)
    fitted = estimator.setFromLogits(True).fit(frame)
    z = fitted.model.predict(X, verbose=0).astype("float64")
    rows = fitted.transform(frame).orderBy("id").select("probability", "rawPrediction").collect()
    e = np.exp(z - z.max(1, keepdims=True))
    got = np.stack([row.probability.toArray() for row in rows])
    np.testing.assert_allclose(got, e / e.sum(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose([row.rawPrediction.toArray() for row in rows], z, atol=1e-5)


def test_callbacks_and_the_summary(spark: Any) -> None:
    seen: list[int] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    stop = keras.callbacks.EarlyStopping("loss", min_delta=100.0, patience=1)
    fitted = quick(callbacks=[callback, stop], epochs=9, validationSplit=0.2).fit(table(spark))
    assert seen == [0, 1]
    assert list(fitted.history) == ["accuracy", "loss", "val_accuracy", "val_loss"] or set(
        fitted.history
    ) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    summary = fitted.summary
    assert summary.totalIterations == 2
    assert summary.objectiveHistory == fitted.history["loss"]
    assert summary.num_workers == 2
    figure = summary.plot()
    assert [axes.get_title() for axes in figure.axes] == [
        n for n in fitted.history if not n.startswith("val_")
    ]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
