"""What training by stages must do wherever Spark runs; see stage_cases.py, which runs these too.

With the cases there they are those of xgboost.spark's own suite, as far as networks have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def case_training_is_that_of_plain_keras(spark: Any, folder: Path) -> None:
    """With weights and validation rows, from the same weights in the same order."""
    from stage_cases import ROWS, X, Y, builder, quick, table

    frame = table(spark).selectExpr(
        "features", "label", "is_validation", "id", "CAST(id % 3 AS FLOAT) + 0.5 AS weight"
    )
    weights = (np.arange(ROWS) % 3 + 0.5).astype("float32")
    held_out = np.arange(ROWS) % 5 == 0
    plain = builder()
    history = plain.fit(
        X[~held_out], Y[~held_out], sample_weight=weights[~held_out], batch_size=16, epochs=3,
        validation_data=(X[held_out], Y[held_out], weights[held_out]), shuffle=False, verbose=0,
    ).history  # fmt: skip
    estimator = quick(
        weightCol="weight", validationIndicatorCol="is_validation", epochs=3, numWorkers=1,
        mode="allreduce", communicator="builtin", shuffle=False, repartition=False,
    )  # fmt: skip
    fitted = estimator.fit(frame.repartition(1).sortWithinPartitions("id"))
    assert set(fitted.history) == set(history)
    for name, values in history.items():
        np.testing.assert_allclose(fitted.history[name], values, rtol=1e-4, err_msg=name)
    for one, other in zip(fitted.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def case_partitions_that_no_barrier_stage_reads(spark: Any, folder: Path) -> None:
    """Spark refuses those of coalesce() and union(): a cached frame is spread again."""
    import pytest
    from stage_cases import quick, table

    from sparkdl.errors import ResourceError

    frame = table(spark).repartition(4).coalesce(2).cache()
    frame.count()
    assert quick(mode="allreduce", epochs=1).fit(frame).summary.rows == frame.count()
    with pytest.raises(ResourceError, match=r"(?s)union, coalesce.*repartition=True"):
        quick(mode="allreduce", epochs=1, repartition=False).fit(frame)
    frame.unpersist()


def case_training_goes_on_from_a_fitted_model(spark: Any, folder: Path) -> None:
    from stage_cases import quick, table

    frame = table(spark).coalesce(1)
    alone = {"numWorkers": 1, "mode": "allreduce", "communicator": "builtin", "shuffle": False}
    base = quick(epochs=2, **alone).fit(frame)
    before = [w.copy() for w in base.model.get_weights()]
    onwards = quick(model=base.model, epochs=3, **alone).fit(frame)
    whole = quick(epochs=5, **alone).fit(frame)
    steps = [int(m.model.optimizer.iterations) for m in (base, onwards, whole)]
    assert steps[0] + 3 * steps[0] // 2 == steps[1] == steps[2]  # the optimizer's state, too
    for one, other in zip(onwards.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for one, other in zip(base.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def case_callbacks_come_back_from_files_and_work(spark: Any, folder: Path) -> None:
    import keras
    from stage_cases import quick, table

    from sparkdl.ml import KerasClassifier

    def falling(epoch: int) -> float:
        return 0.5 / (epoch + 1)

    estimator = quick(
        epochs=3, numWorkers=1, mode="allreduce",
        callbacks=[keras.callbacks.LearningRateScheduler(falling)],
    )  # fmt: skip
    estimator.save(f"{folder}/estimator")
    loaded = KerasClassifier.read().trusted().load(f"{folder}/estimator")
    fitted = loaded.fit(table(spark))
    np.testing.assert_allclose(fitted.history["learning_rate"], [0.5, 0.25, 0.5 / 3], rtol=1e-6)


def case_workers_with_only_one_kind_of_rows(spark: Any, folder: Path) -> None:
    """One row to train on and three to validate on, and the other way round, on two workers."""
    from pyspark.sql import functions as F
    from stage_cases import quick, table

    four = table(spark).where("id < 4").repartition(2)
    for held_out, trained in (("id > 0", 1), ("id = 0", 3)):
        frame = four.withColumn("is_validation", F.expr(held_out))
        fitted = quick(validationIndicatorCol="is_validation").fit(frame)
        assert fitted.summary.rows == trained
        assert len(fitted.history["val_loss"]) == 2
        assert np.isfinite(fitted.history["val_loss"]).all()
        assert fitted.transform(frame).count() == 4


def case_more_partitions_than_rows(spark: Any, folder: Path) -> None:
    from stage_cases import quick, table

    frame = table(spark).where("id < 40").repartition(50, "id")
    fitted = quick(epochs=1).fit(frame)
    assert fitted.summary.rows == 40
    predicted = fitted.transform(frame).select("prediction").collect()
    assert {row.prediction for row in predicted} <= {0.0, 1.0, 2.0}
    assert len(predicted) == 40


def case_dense_and_sparse_vectors_in_one_column(spark: Any, folder: Path) -> None:
    from pyspark.ml.linalg import Vectors
    from stage_cases import Y, quick

    rng = np.random.default_rng(5)
    x = np.zeros((60, 4))
    x[:, 1:3] = rng.normal(size=(60, 2))
    x[::2] = rng.normal(size=(30, 4))
    rows = [
        (Vectors.dense(v) if i % 2 == 0 else Vectors.sparse(4, [1, 2], v[1:3]), float(Y[i]), i)
        for i, v in enumerate(x)
    ]
    frame = spark.createDataFrame(rows, ["features", "label", "id"])
    fitted = quick(epochs=1).fit(frame)
    got = [row.probability.toArray() for row in fitted.transform(frame).orderBy("id").collect()]
    np.testing.assert_allclose(got, fitted.model.predict(x.astype("float32"), verbose=0), atol=1e-6)


def case_params_of_a_stage_inside_of_a_pipeline(spark: Any, folder: Path) -> None:
    """Set in a copy of the pipeline, as NumPy's numbers, and kept in files."""
    from pyspark.ml import Pipeline, PipelineModel
    from stage_cases import quick, table

    classifier = quick(metrics=["accuracy", "sparse_top_k_categorical_accuracy"],
                       loss="sparse_categorical_crossentropy")  # fmt: skip
    pipeline = Pipeline(stages=[classifier])
    extra = {classifier.epochs: np.int64(3), classifier.learningRate: np.float64(0.25)}
    copied = pipeline.copy(extra)
    assert type(copied.getStages()[0].getEpochs()) is int
    assert type(copied.getStages()[0].getLearningRate()) is float
    copied.write().overwrite().save(f"{folder}/pipeline")
    again = Pipeline.load(f"{folder}/pipeline")
    assert again.getStages()[0].getLearningRate() == 0.25
    model = again.fit(table(spark))
    fitted = model.stages[0]
    assert len(fitted.history["sparse_top_k_categorical_accuracy"]) == 3
    assert float(fitted.model.optimizer.learning_rate) == 0.25
    model.write().overwrite().save(f"{folder}/model")
    loaded = PipelineModel.load(f"{folder}/model").stages[0]
    assert loaded.history == fitted.history
    assert classifier.getEpochs() == 2


CASES = {name: case for name, case in globals().items() if name.startswith("case_")}
