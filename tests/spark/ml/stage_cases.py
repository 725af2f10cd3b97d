"""What stages of sparkdl.ml must do wherever Spark runs: on a cluster, in one process, on Connect.

Each case takes a session and an empty folder. ``run_all`` is for processes of their own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import estimator_cases
import numpy as np
import pytest
import training_cases
from stage_tables import ROWS, X, Y, builder, quick, table, weights_digest

__all__ = ["CASES", "X", "builder", "quick", "run_all", "table", "weights_digest"]


def accuracy(frame: Any) -> float:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    return float(MulticlassClassificationEvaluator(metricName="accuracy").evaluate(frame))


def case_columns_are_of_sparks_own_types_and_keras_own_numbers(spark: Any, folder: Path) -> None:
    frame = table(spark)
    model = quick().fit(frame)
    scored = model.transform(frame)
    assert scored.schema == model.transformSchema(frame.schema)
    kinds = {f.name: f.dataType.simpleString() for f in scored.schema.fields}
    assert kinds["prediction"] == "double"
    assert kinds["probability"] == kinds["rawPrediction"] == "vector"
    rows = scored.orderBy("id").select("prediction", "probability", "rawPrediction").collect()
    want = model.model.predict(X, verbose=0)
    got = np.stack([row.probability.toArray() for row in rows])
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert [row.prediction for row in rows] == want.argmax(1).tolist()
    raw = np.stack([row.rawPrediction.toArray() for row in rows])
    np.testing.assert_allclose(raw, np.log(want), atol=1e-5)
    assert model.numClasses == 3
    assert model.numFeatures == 4
    np.testing.assert_allclose(model.predictProbability(X[0]).toArray(), want[0], atol=1e-6)
    assert model.predict(X[0]) == want[0].argmax()
    without = model.copy().setProbabilityCol("").setRawPredictionCol("").transform(frame)
    assert without.columns == [*frame.columns, "prediction"]
    assert abs(accuracy(scored) - (want.argmax(1) == Y).mean()) < 1e-9


def case_features_of_every_kind(spark: Any, folder: Path) -> None:
    want = None
    for kind, columns in (
        ("vector", "features"), ("array", "features"), ("sparse", "features"),
        ("array", ["a", "b", "c", "d"]),
    ):  # fmt: skip
        model = quick(
            featuresCol=columns, epochs=1, numWorkers=1, repartition=False, shuffle=False
        ).fit(table(spark, kind).orderBy("id").coalesce(1))
        scored = model.transform(table(spark, kind)).orderBy("id").select("probability").collect()
        got = np.stack([row.probability.toArray() for row in scored])
        want = got if want is None else want
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=f"{kind} {columns}")


def case_a_pipeline_is_saved_and_loaded(spark: Any, folder: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import StandardScaler, VectorAssembler

    frame = table(spark).drop("features")
    stages = [
        VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="joined"),
        StandardScaler(inputCol="joined", outputCol="scaled", withMean=True),
        quick(featuresCol="scaled", seed=3),
    ]
    nested = Pipeline(stages=[Pipeline(stages=stages[:2]), stages[2]])
    nested.write().overwrite().save(f"{folder}/unfitted")
    again = Pipeline.load(f"{folder}/unfitted")
    assert again.getStages()[1].getBatchSize() == 16
    fitted = again.fit(frame)
    path = f"{folder}/fitted"
    fitted.save(path)
    fitted.write().overwrite().save(path)
    loaded = PipelineModel.load(path)
    ours, its = fitted.stages[-1], loaded.stages[-1]
    assert its.uid == ours.uid
    assert its.summary == ours.summary
    assert {p.name: v for p, v in its.extractParamMap().items()} == {
        p.name: v for p, v in ours.extractParamMap().items()
    }
    assert its.trained.archive.content == ours.trained.archive.content
    assert int(its.model.optimizer.iterations) == int(ours.model.optimizer.iterations) > 0
    before = fitted.transform(frame).orderBy("id").select("probability").collect()
    assert loaded.transform(frame).orderBy("id").select("probability").collect() == before


def case_validation_and_weights(spark: Any, folder: Path) -> None:
    from pyspark.sql import functions as F

    frame = table(spark)
    # rows of class 0 weigh nothing, so that it is never learned
    frame = frame.withColumn("weight", F.when(F.col("label") == 0, 0.0).otherwise(1.0))
    estimator = quick(weightCol="weight", validationIndicatorCol="is_validation", epochs=12)
    model = estimator.fit(frame)
    assert len(model.history["val_loss"]) == 12
    assert model.summary.rows == ROWS - ROWS // 5
    predicted = model.transform(frame).groupBy("prediction").count().collect()
    assert {row.prediction for row in predicted} == {1.0, 2.0}
    no_rows = frame.where("id < 0")
    none_to_validate = frame.withColumn("is_validation", F.lit(False))
    with pytest.warns(RuntimeWarning, match="no row was chosen to validate on"):
        assert quick(validationIndicatorCol="is_validation", epochs=1).fit(none_to_validate)
    assert model.transform(no_rows).collect() == []


def case_no_rows(spark: Any, folder: Path) -> None:
    from sparkdl.errors import DataError

    with pytest.raises(DataError, match="no rows to train on"):
        quick().fit(table(spark).where("id < 0"))
    with_empty_partitions = table(spark).where("id < 20").repartition(8)
    assert quick(epochs=1).fit(with_empty_partitions).summary.rows == 20


def case_two_validators_at_once_share_nothing(spark: Any, folder: Path) -> None:
    """Four fits, two at a time, whose workers must run at the same time, on slots for one fit."""
    import keras
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

    from sparkdl.spark.runs.capacity import default_parallelism

    classifier = quick(
        model=None, modelBuilder=builder, mode="synchronous", startTimeoutS=300.0,
        numWorkers=default_parallelism(spark),
        callbacks=[keras.callbacks.EarlyStopping("loss", patience=5)],
    )  # fmt: skip
    grid = (
        ParamGridBuilder()
        .addGrid(classifier.builderArgs, [{"units": 2}, {"units": 16}])
        .addGrid(classifier.epochs, [12])
        .build()
    )
    validator = CrossValidator(
        estimator=classifier, estimatorParamMaps=grid, numFolds=2, parallelism=2, seed=1,
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"), collectSubModels=True,
    )  # fmt: skip
    tuned = validator.fit(table(spark))
    assert tuned.avgMetrics[1] > tuned.avgMetrics[0]
    assert tuned.bestModel.model.layers[0].units == 16
    for models in tuned.subModels:
        assert [model.model.layers[0].units for model in models] == [2, 16]
    tuned.write().overwrite().save(f"{folder}/tuned")
    from sparkdl.ml import trusted

    with trusted():  # the estimator inside has a builder and callbacks
        loaded = CrossValidatorModel.load(f"{folder}/tuned")
    assert loaded.avgMetrics == tuned.avgMetrics
    assert loaded.bestModel.trained.archive.content == tuned.bestModel.trained.archive.content


CASES: dict[str, Callable[[Any, Path], None]] = {
    **{name: case for name, case in globals().items() if name.startswith("case_")},
    **training_cases.CASES,
    **estimator_cases.CASES,
}


def run_all(spark: Any) -> None:
    """Runs every case, and says so."""
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            case(spark, Path(folder))
        print(name, "OK", flush=True)
    print("ALL CASES OK", file=sys.stdout, flush=True)
