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
    MulticlassClassificationEvaluator,
)
from pyspark.ml.feature import StandardScaler, VectorAssembler
from stage_cases import X, builder, quick, table

from sparkdl.errors import ModelError
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
    schema = ", ".join(f"`{name}` double" for name in [*names, "label"])
    frame = spark.createDataFrame(rows, schema).repartition(2).cache()
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
    raw = [row.rawPrediction.toArray() for row in rows]  # grows with the probability
    np.testing.assert_allclose(raw, np.log(e / e.sum(1, keepdims=True)), atol=1e-5)


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
