"""``FTRLClassifier`` on Spark: real data, pipelines, files, and rows that are refused."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("SPARKDL_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="module")
def clicks(spark: Any) -> Any:
    """600 rows of vectors of the largest size, whose label follows from two of their indices."""
    from pyspark.ml.linalg import Vectors

    rng = np.random.default_rng(0)
    size = 2**31 - 1
    rows = []
    for number in range(600):
        noise = sorted({int(i) for i in rng.integers(10, size - 2, 3)})
        label = float(rng.random() < 0.5)
        told = {2**31 - 3: 1.0} if label else {5: 2.0}
        entries = {**told, **dict.fromkeys(noise, 1.0)}
        rows.append((label, Vectors.sparse(size, entries), 1.0 + number % 2, number))
    frame = spark.createDataFrame(rows, ["label", "features", "w", "id"]).cache()
    frame.count()
    return frame


def refused(frame: Any, **arguments: Any) -> Any:
    from sparkdl.errors import SparkDLError
    from sparkdl.sparse import FTRLClassifier

    with pytest.raises(SparkDLError) as caught:
        FTRLClassifier(**{"numWorkers": 2, **arguments}).fit(frame)
    return caught.value


@pytest.mark.skipif(not (DATA / "a9a.libsvm.gz").exists(), reason="a9a is not here")
def test_a9a_is_learnt_as_well_as_by_vowpal_wabbit(spark: Any, tmp_path: Path) -> None:
    """The log loss of one pass of `vw --ftrl` is 0.332; published AUC about 0.90."""
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    from sparkdl.sparse import FTRLClassifier

    file = tmp_path / "a9a.libsvm"
    file.write_bytes(gzip.decompress((DATA / "a9a.libsvm.gz").read_bytes()))
    frame = spark.read.format("libsvm").option("numFeatures", 123).load(str(file))
    frame = frame.withColumn("label", (F.col("label") + 1) / 2).repartition(2).cache()
    train, test = frame.randomSplit([0.8, 0.2], 1)
    model = FTRLClassifier(batchSize=100, numWorkers=2).fit(train)
    scored = model.transform(test)
    assert BinaryClassificationEvaluator().evaluate(scored) > 0.895
    p = F.element_at(F.col("p"), 2)
    own = F.when(F.col("label") == 1, p).otherwise(1 - p)
    loss = scored.withColumn("p", vector_to_array("probability")).select(F.avg(-F.log(own)))
    assert loss.first()[0] == pytest.approx(0.335, abs=0.012)
    [during] = model.lossHistory
    assert during == pytest.approx(0.345, abs=0.012)
    sparser = FTRLClassifier(batchSize=100, numWorkers=2, lambda1=100.0).fit(train)
    assert 0 < sparser.nnz < model.nnz <= 123
    assert model.numFeatures == 123
    again = FTRLClassifier(batchSize=100, numWorkers=2).fit(train)
    assert again.coefficients == model.coefficients, "a fit repeats to the last bit"


@pytest.mark.oldest
def test_indices_up_to_the_largest_are_learnt(clicks: Any) -> None:
    from sparkdl.sparse import FTRLClassifier

    model = FTRLClassifier(batchSize=50, maxIter=4, numWorkers=2, alpha=0.5).fit(clicks)
    assert model.numFeatures == 2**31 - 1
    weights = dict(zip(model.coefficients.indices.tolist(), model.coefficients.values, strict=True))
    assert weights[2**31 - 3] > 1
    assert weights[5] < -0.5
    scored = model.transform(clicks)
    assert scored.columns == [*clicks.columns, "rawPrediction", "probability", "prediction"]
    rows = scored.collect()
    assert sum(row.prediction == row.label for row in rows) == 600
    for row in rows[:20]:
        margin = model.intercept + sum(
            weights.get(int(i), 0.0) * v
            for i, v in zip(row.features.indices, row.features.values, strict=True)
        )
        assert row.rawPrediction.toArray() == pytest.approx([-margin, margin], rel=1e-12)
        assert row.probability[1] == pytest.approx(1 / (1 + math.exp(-margin)))
        assert model.predict(row.features) == row.prediction
    history = model.lossHistory
    assert len(history) == 4
    assert history == sorted(history, reverse=True)
    named = model.copy().setProbabilityCol("p").setRawPredictionCol("").setPredictionCol("")
    assert named.transform(clicks).columns == [*clicks.columns, "p"]


def test_any_number_of_workers_gives_the_same_model(clicks: Any) -> None:
    """Each step takes all rows, so that the batches are the same."""
    from sparkdl.sparse import FTRLClassifier

    found = [
        FTRLClassifier(batchSize=600, maxIter=3, numWorkers=count, weightCol="w").fit(clicks)
        for count in (1, 3)
    ]
    first, second = (model.coefficients for model in found)
    assert first.indices.tolist() == second.indices.tolist()
    np.testing.assert_allclose(first.values, second.values, atol=1e-9)
    assert found[0].intercept == pytest.approx(found[1].intercept, abs=1e-9)


def test_weights_count_rows(spark: Any, clicks: Any) -> None:
    from pyspark.sql import functions as F

    from sparkdl.sparse import FTRLClassifier

    twice = clicks.withColumn("n", F.explode(F.sequence(F.lit(1), F.col("w").cast("int"))))
    settings = {"batchSize": 10**6, "maxIter": 3, "numWorkers": 2}
    weighted = FTRLClassifier(weightCol="w", **settings).fit(clicks)
    repeated = FTRLClassifier(**settings).fit(twice)
    assert weighted.coefficients.indices.tolist() == repeated.coefficients.indices.tolist()
    np.testing.assert_allclose(
        weighted.coefficients.values, repeated.coefficients.values, atol=1e-9
    )


def test_ranks_without_rows_take_part(spark: Any, clicks: Any) -> None:
    from sparkdl.sparse import FTRLClassifier

    model = FTRLClassifier(numWorkers=3).fit(clicks.limit(2))
    assert model.nnz > 0
    error = refused(clicks.limit(0))
    assert "no rows" in str(error)


def test_a_pipeline_is_validated_saved_and_loaded(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.feature import FeatureHasher
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    from sparkdl.sparse import FTRLClassificationModel, FTRLClassifier

    rng = np.random.default_rng(1)
    drawn = rng.integers(0, 8, (300, 2)).tolist()
    rows = [(f"site{a}", f"ad{b}", int(a + b > 7)) for a, b in drawn]
    frame = spark.createDataFrame(rows, "site string, ad string, click int").cache()
    hasher = FeatureHasher(inputCols=["site", "ad"], outputCol="features", numFeatures=1 << 20)
    classifier = FTRLClassifier(labelCol="click", batchSize=30, maxIter=3, numWorkers=2)
    pipeline = Pipeline(stages=[hasher, classifier])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    again = Pipeline.load(str(tmp_path / "pipeline"))
    assert again.getStages()[1].getBatchSize() == 30
    grid = ParamGridBuilder().addGrid(classifier.lambda1, [0.0, 1000.0]).build()
    judge = BinaryClassificationEvaluator(labelCol="click")
    found = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=judge, numFolds=2
    ).fit(frame)
    assert found.avgMetrics[0] > 0.9
    assert found.avgMetrics[1] == pytest.approx(0.5)  # no weight passes lambda1
    model = again.fit(frame)
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    scored = [m.transform(frame).select("probability").collect() for m in (model, loaded)]
    assert scored[0] == scored[1]
    stage = loaded.stages[1]
    assert isinstance(stage, FTRLClassificationModel)
    assert stage.lossHistory == model.stages[1].lossHistory
    assert stage.numFeatures == 1 << 20


def test_what_cannot_be_trained_on_is_refused_before_a_job(spark: Any, clicks: Any) -> None:
    spark.sparkContext.setJobGroup("refused", "none")
    for frame, arguments, text in (
        (clicks, {"featuresCol": "label"}, "vectors of pyspark.ml"),
        (clicks, {"featuresCol": "feature"}, "did you mean 'features'"),
        (clicks, {"labelCol": "features"}, "cannot be used as labelCol"),
        (clicks, {"weightCol": "none"}, "(weightCol) is not in the data"),
        ([1, 2], {}, "DataFrame"),
        (clicks, {"numWorkers": 64}, "64 workers must run at the same time"),
    ):
        assert text in str(refused(frame, **arguments))
    tracker = spark.sparkContext.statusTracker()
    assert list(tracker.getJobIdsForGroup("refused")) == []
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("label + 1", "label 2 in the row with features {"),
        ("if(id = 77, double('nan'), label)", "label null or NaN in the row"),
        ("if(id = 77, null, label)", "label null or NaN in the row"),
    ],
)
def test_labels_other_than_0_and_1_are_refused(clicks: Any, change: str, text: str) -> None:
    from pyspark.sql import functions as F

    from sparkdl.errors import DataError

    error = refused(clicks.withColumn("label", F.expr(change)))
    assert isinstance(error, DataError)
    assert text in error.received


def test_features_that_are_no_numbers_are_refused_and_not_scored(spark: Any, clicks: Any) -> None:
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import functions as F

    from sparkdl.sparse import FTRLClassifier

    odd = spark.createDataFrame(
        [(1.0, Vectors.sparse(9, {3: float("nan")})), (0.0, Vectors.dense([1.0] * 9))],
        ["label", "features"],
    )
    assert "{3: nan}" in refused(odd).received
    missing = odd.withColumn("features", F.when(F.col("label") == 0, F.col("features")))
    assert "no features" in str(refused(missing))
    model = FTRLClassifier(numWorkers=2).fit(odd.filter("label = 0"))
    assert model.numFeatures == 9
    with pytest.raises(Exception, match="no finite number"):
        model.transform(odd).collect()
