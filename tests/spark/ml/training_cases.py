"""What training by stages must do wherever Spark runs; see stage_cases.py, which runs these too.

With the cases there they are those of xgboost.spark's own suite, as far as networks have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def case_training_is_that_of_plain_keras(spark: Any, folder: Path) -> None:
    """With weights and validation rows, from the same weights in the same order."""
    from stage_tables import ROWS, X, Y, builder, quick, table

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
    from stage_tables import quick, table

    from sparkdl.errors import ResourceError

    frame = table(spark).repartition(4).coalesce(2).cache()
    frame.count()
    assert quick(mode="allreduce", epochs=1).fit(frame).summary.rows == frame.count()
    with pytest.raises(ResourceError, match=r"(?s)union, coalesce.*repartition=True"):
        quick(mode="allreduce", epochs=1, repartition=False).fit(frame)
    frame.unpersist()


def case_training_goes_on_from_a_fitted_model(spark: Any, folder: Path) -> None:
    from stage_tables import quick, table

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


def case_folds_go_on_from_no_other_fold(spark: Any, folder: Path) -> None:
    """resume=True in a validator, also within a pipeline: a fold would resume the one before."""
    import pytest
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator
    from stage_tables import quick, table

    from sparkdl.errors import ConfigError

    estimator = quick(epochs=1, checkpointDir=f"{folder}/kept", resume=True)
    for tuned in (estimator, Pipeline(stages=[estimator])):
        validator = CrossValidator(
            estimator=tuned, estimatorParamMaps=[{}], numFolds=2, seed=1,
            evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        )  # fmt: skip
        with pytest.raises(ConfigError, match=r"(?s)would go on.*received: resume=True"):
            validator.fit(table(spark))
    assert not (folder / "kept").exists()


def case_every_way_of_training(spark: Any, folder: Path) -> None:
    """Modes, rules, compression and checkpoints reach SparkModel from the Params."""
    from stage_tables import quick, table

    frame = table(spark).cache()
    frame.count()
    for settings in (
        {"mode": "asynchronous", "rule": {"name": "dynsgd"}, "compression": "int8"},
        {"mode": "hogwild", "frequency": "batch", "parameterServerMode": "socket"},
        {"mode": "synchronous", "compression": {"name": "topk"}},
        {"mode": "allreduce", "rule": {"name": "local_sgd"}, "communicator": "builtin"},
        {"mode": "allreduce", "compression": "fp16", "communicator": "builtin"},
    ):
        path = f"{folder}/{settings['mode']}-{len(settings)}"
        estimator = quick(epochs=1, checkpointDir=path, **settings)
        first = estimator.fit(frame)
        assert len(first.history["loss"]) == 1, settings
        assert np.isfinite(first.history["loss"]).all()
        if "rule" not in settings:  # one with a server and one without go on
            continue
        onwards = estimator.setResume(True).setEpochs(3).fit(frame)
        assert len(onwards.history["loss"]) == 2, settings
        steps = [int(stage.model.optimizer.iterations) for stage in (first, onwards)]
        assert 0 < steps[0] < steps[1], settings
        assert np.isfinite(onwards.history["loss"]).all()
    frame.unpersist()


def case_weights_of_classes_and_steps(spark: Any, folder: Path) -> None:
    """Class 0 weighs nothing, so that it is never learned; two steps of each worker and epoch."""
    from stage_tables import quick, table

    frame = table(spark)
    estimator = quick(
        classWeight={0: 0.0, 1: 1.0, 2: 1.0}, epochs=12, numWorkers=1, mode="allreduce",
        communicator="builtin", validationSplit=0.2, validationSteps=1,
    )  # fmt: skip
    fitted = estimator.fit(frame)
    assert len(fitted.history["val_loss"]) == 12
    predicted = fitted.transform(frame).select("prediction").distinct().collect()
    assert {row.prediction for row in predicted} == {1.0, 2.0}
    short = quick(stepsPerEpoch=2, numWorkers=1, mode="allreduce", communicator="builtin")
    assert int(short.fit(frame).model.optimizer.iterations) == 4


def case_arrays_of_different_length(spark: Any, folder: Path) -> None:
    """``pad`` of the estimator is that of the model that it fits."""
    import keras
    from pyspark.sql import functions as F
    from stage_tables import quick, table

    from sparkdl.ml import KerasClassificationModel

    numbers = "transform(slice(features, 1, 1 + id % 4), x -> int(least(abs(x) * 2, 7)) + 1)"
    frame = table(spark, "array").withColumn("features", F.expr(numbers))
    keras.utils.set_random_seed(5)
    layers = [
        keras.Input((None,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3, activation="softmax"),
    ]  # fmt: skip
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy")
    fitted = quick(model=model, epochs=1, pad=0).fit(frame)
    fitted.save(f"{folder}/model")
    loaded = KerasClassificationModel.load(f"{folder}/model")
    rows = loaded.transform(frame).orderBy("id").select("features", "probability").collect()
    padded = np.zeros((len(rows), 4), "int32")
    for place, row in zip(padded, rows, strict=True):
        place[: len(row.features)] = row.features
    want = fitted.model.predict(padded, verbose=0)
    np.testing.assert_allclose([row.probability.toArray() for row in rows], want, atol=1e-6)


def case_callbacks_come_back_from_files_and_work(spark: Any, folder: Path) -> None:
    import keras
    from stage_tables import quick, table

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
    from stage_tables import quick, table

    four = table(spark).where("id < 4").repartition(2)
    for held_out, trained in (("id > 0", 1), ("id = 0", 3)):
        frame = four.withColumn("is_validation", F.expr(held_out))
        fitted = quick(validationIndicatorCol="is_validation").fit(frame)
        assert fitted.summary.rows == trained
        assert len(fitted.history["val_loss"]) == 2
        assert np.isfinite(fitted.history["val_loss"]).all()
        assert fitted.transform(frame).count() == 4


def case_more_partitions_than_rows(spark: Any, folder: Path) -> None:
    from stage_tables import quick, table

    frame = table(spark).where("id < 40").repartition(50, "id")
    fitted = quick(epochs=1).fit(frame)
    assert fitted.summary.rows == 40
    predicted = fitted.transform(frame).select("prediction").collect()
    assert {row.prediction for row in predicted} <= {0.0, 1.0, 2.0}
    assert len(predicted) == 40


def case_dense_and_sparse_vectors_in_one_column(spark: Any, folder: Path) -> None:
    from pyspark.ml.linalg import Vectors
    from stage_tables import Y, quick

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
    from stage_tables import quick, table

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
