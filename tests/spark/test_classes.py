"""A model with very many classes through Spark: trained, evaluated, gone on with, and refused."""

from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np
import pytest
from faulty import AtEpoch, python_workers
from pyspark.sql import functions as F

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError, ModelError, WorkerError
from sparkdl.layers import CosFace, ShardedClassifier

ROWS, CLASSES, DIM = 240, 60, 8


def make_model(**settings: Any) -> tuple[Any, ShardedClassifier]:
    keras.utils.set_random_seed(1)
    x = keras.Input((6,), name="features")
    layer = ShardedClassifier(
        CLASSES, margin=CosFace(0.1, 12.0), table="faces", seed=2, chunk=16, **settings
    )
    model = keras.Model(x, layer(keras.layers.Dense(DIM)(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), layer.loss, metrics=[layer.accuracy])
    return model, layer


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, ROWS)
    means = rng.normal(size=(CLASSES, 6))
    return (means[labels] + 0.05 * rng.normal(size=(ROWS, 6))).astype("float32"), labels


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    x, labels = make_rows()
    rows = [(row.tolist(), int(label)) for row, label in zip(x, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").cache()


def test_a_fit_an_evaluation_and_a_fit_that_goes_on(frame: Any, tmp_path: Any) -> None:
    x, labels = make_rows()
    model, layer = make_model()
    spark_model = SparkModel(model, "allreduce", num_workers=2, batch_size=16)
    history = spark_model.fit(
        frame, epochs=20, verbose=0, checkpoint_dir=str(tmp_path / "run"), validation_split=0.1
    ).history
    assert history["accuracy"][-1] > max(0.7, history["accuracy"][0])
    assert 0 <= history["val_accuracy"][-1] <= 1
    table = spark_model.tables["faces"]
    assert len(table) == CLASSES
    np.testing.assert_array_equal(layer.centers([3, 5]), table.pull(np.array([3, 5])))

    here = dict(zip(("loss", "accuracy"), model.evaluate(x, labels, verbose=0), strict=True))
    assert spark_model.evaluate(frame) == pytest.approx(here, abs=1e-5)
    features = np.array([row["prediction"] for row in spark_model.predict(frame).collect()])
    classes, cosines = layer.top_classes(features, k=3)
    assert (classes[:, 0] == labels).mean() == pytest.approx(here["accuracy"])
    assert (np.diff(cosines) <= 0).all()
    assert (np.abs(cosines) <= 1.001).all()

    again, _ = make_model()
    more = SparkModel(again, "allreduce", num_workers=1, batch_size=32).fit(
        frame, epochs=21, verbose=0, checkpoint_dir=str(tmp_path / "run"), resume=True
    )
    assert len(more.history["loss"]) == 1
    assert more.history["accuracy"][0] > 0.6


def test_a_killed_worker_costs_no_step_and_a_gradient_that_is_not_finite_is_told(
    frame: Any, tmp_path: Any
) -> None:
    def kill() -> None:
        os.kill(python_workers()[0].pid, signal.SIGKILL)

    found = []
    for name, callbacks in (("undisturbed", None), ("killed", [AtEpoch(1, kill)])):
        model, layer = make_model()
        SparkModel(model, "allreduce", num_workers=2, batch_size=16).fit(
            frame, epochs=4, verbose=0, checkpoint_dir=str(tmp_path / name), callbacks=callbacks
        )
        found.append([layer.centers(np.arange(CLASSES)), *model.get_weights()])
    for undisturbed, killed in zip(*found, strict=True):
        np.testing.assert_array_equal(killed, undisturbed)

    nothing = F.transform("features", lambda _: F.lit(float("nan")).cast("float"))
    spark_model = SparkModel(make_model()[0], "allreduce", num_workers=2)
    with pytest.raises(ModelError, match="gradient of a class is not finite"):
        spark_model.fit(
            frame.withColumn("features", nothing), verbose=0, checkpoint_dir=str(tmp_path / "nan")
        )


def test_what_cannot_train_classes_is_refused(frame: Any, tmp_path: Any) -> None:
    model, _ = make_model()
    with pytest.raises(ConfigError, match="mode='allreduce'"):
        SparkModel(model, "asynchronous").fit(frame, checkpoint_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        SparkModel(model, "allreduce", num_workers=2).fit(frame)
    rows = frame.withColumn("label", frame.label + 1)  # the largest is no class
    with pytest.raises((DataError, WorkerError), match="label"):
        SparkModel(model, "allreduce", num_workers=2).fit(rows, checkpoint_dir=str(tmp_path / "b"))
    wrong, _ = make_model()
    wrong.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ModelError, match="no scores of classes"):
        SparkModel(wrong, "allreduce", num_workers=2).fit(frame, checkpoint_dir=str(tmp_path))
