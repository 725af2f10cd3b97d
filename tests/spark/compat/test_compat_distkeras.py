"""Programs for dist-keras run after a change of their imports: all trainers, predictor, columns."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from sparkdl.compat.distkeras.evaluators import AccuracyEvaluator
from sparkdl.compat.distkeras.predictors import ModelPredictor

from sparkdl import Network
from sparkdl.compat.distkeras.trainers import (
    ADAG,
    AEASGD,
    DOWNPOUR,
    EAMSGD,
    AveragingTrainer,
    DynSGD,
    EnsembleTrainer,
    Experimental,
    SingleTrainer,
)
from sparkdl.compat.distkeras.transformers import (
    BinaryLabelTransformer,
    DenseTransformer,
    LabelIndexTransformer,
    MinMaxTransformer,
    OneHotTransformer,
    ReshapeTransformer,
    StandardTransformer,
)
from sparkdl.compat.distkeras.utils import (
    deserialize_keras_model,
    precache,
    serialize_keras_model,
    to_one_hot_encoded_dense,
    uniform_weights,
)
from sparkdl.errors import ConfigError, DataError

ROWS = 400
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = X.argmax(1)


def network() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="softmax")])


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    rows = [(Vectors.dense(x.astype(float)), int(y)) for x, y in zip(X, Y, strict=True)]
    frame = spark.createDataFrame(rows, ["features", "label_index"])
    return precache(OneHotTransformer(3, "label_index", "label").transform(frame), 2)


def accuracy_of(model: Any, frame: Any) -> float:
    """As dist-keras' notebooks compute it."""
    scored = ModelPredictor(keras_model=model, features_col="features").predict(frame)
    indexed = LabelIndexTransformer(output_dim=3).transform(scored)
    evaluator = AccuracyEvaluator(prediction_col="prediction_index", label_col="label_index")
    return evaluator.evaluate(indexed)


def test_the_workflow_of_dist_keras_notebooks(table: Any) -> None:
    model = network()
    before = model.get_weights()
    trainer = SingleTrainer(
        keras_model=model, worker_optimizer=keras.optimizers.Adam(0.05),
        loss="categorical_crossentropy", features_col="features", label_col="label",
        num_epoch=8, batch_size=32,
    )  # fmt: skip
    trained = trainer.train(table, shuffle=True)
    assert accuracy_of(trained, table) > 0.9
    assert accuracy_of(model, table) < 0.9  # the one that was given is as it was
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert trainer.get_training_time() > 0
    history = trainer.get_averaged_history()
    assert len(history) == 8
    assert history[-1][0] < history[0][0]
    assert trainer.get_executor_history(0) == trainer.get_history()
    scored = ModelPredictor(trained, output_col="p").predict(table)
    assert dict(scored.dtypes)["p"] == "vector"
    rows = scored.select("features", "p").limit(5).collect()
    want = trained.predict(np.array([row.features.toArray() for row in rows]), verbose=0)
    np.testing.assert_allclose([row.p.toArray() for row in rows], want, atol=1e-6)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (AveragingTrainer, {}),
        (DOWNPOUR, {"communication_window": 3}),
        (EAMSGD, {"momentum": 0.8}),
        *(  # DOWNPOUR, or EAMSGD, with another rule: see below
            pytest.param(trainer, {}, marks=pytest.mark.slow)
            for trainer in (ADAG, DynSGD, AEASGD, Experimental)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_trainers_learn(trainer: Any, options: Any, table: Any) -> None:
    made = trainer(
        network(), keras.optimizers.SGD(0.3), "categorical_crossentropy", num_workers=2,
        batch_size=8, num_epoch=12, **options,
    )  # fmt: skip
    trained = made.train(table)
    history = [values[0] for values in made.get_averaged_history()]
    assert history[-1] < 0.8 * history[0]
    assert accuracy_of(trained, table) > 0.8
    with pytest.raises(ConfigError, match="get_averaged_history"):
        made.get_executor_history(0)
    if trainer is DOWNPOUR:
        assert made.num_updates() == 12 * 2 * 9  # 25 steps of each worker, 3 a window


def test_an_ensemble(table: Any) -> None:
    made = EnsembleTrainer(
        network(), "adam", "categorical_crossentropy", batch_size=16, num_ensembles=2
    )
    models = [deserialize_keras_model(one) for one in made.train(table)]
    assert len(models) == 2
    assert not np.array_equal(models[0].get_weights()[0], models[1].get_weights()[0])


def test_settings_of_trainers() -> None:
    made = DOWNPOUR(network(), "sgd", "mse", num_workers=3)
    assert (made.communication_window, made.get_num_workers(), made.master_port) == (5, 3, 0)
    made.set_num_workers(2)
    made.set_parallelism_factor(2)
    made.set_minibatch_size(64)
    made.set_num_epoch(3)
    made.set_master("10.0.0.1")
    assert made._settings() == {
        "mode": "asynchronous", "rule": "downpour", "frequency": 5, "num_workers": 4,
        "network": Network(server_address="10.0.0.1"),
    }  # fmt: skip
    assert (made.get_minibatch_size(), made.get_num_epoch()) == (64, 3)
    assert isinstance(made.serialize(), bytes)
    for trainer, rule, window in ((DOWNPOUR, "downpour", 5), (ADAG, "adag", 12),
                                  (DynSGD, "dynsgd", 5)):  # fmt: skip
        settings = trainer(network(), "sgd", "mse")._settings()
        assert (settings["rule"], settings["frequency"]) == (rule, window)
    elastic = AEASGD(network(), "sgd", "mse", num_workers=20)
    with pytest.warns(RuntimeWarning, match="not stable with 20 workers"):
        assert elastic._settings()["rule"].rho is None
    model = network()
    uniform_weights(model, [0.25, 0.5])
    assert all((w >= 0.25).all() and (w <= 0.5).all() for w in model.get_weights())
    again = deserialize_keras_model(serialize_keras_model(model))
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    with pytest.raises(DataError, match="0 to 1"):
        to_one_hot_encoded_dense(2.0)


def test_transformers_of_vectors_and_numbers(spark: Any) -> None:
    rows = [
        (Vectors.sparse(4, [1, 3], [10.0, 4.0]), 1.0, "signal"),
        (Vectors.dense(0.0, 2.0, 4.0, 6.0), 3.0, None),
    ]
    frame = spark.createDataFrame(rows, ["v", "x", "kind"])
    moved = MinMaxTransformer(0, 10, -1, 1, "v", "w").transform(frame)
    np.testing.assert_allclose(moved.first().w.toArray(), [-1, 1, -1, -0.2])
    single = MinMaxTransformer(0, 10, 0, 1, "x", "y", is_vector=False).transform(frame)
    assert [row.y for row in single.collect()] == pytest.approx([0.1, 0.3])
    with pytest.raises(ConfigError, match="o_min < o_max"):
        MinMaxTransformer(1, 1, 0, 1, "x", "y")
    binary = BinaryLabelTransformer("kind", "label", "signal").transform(frame)
    assert [list(row.label.toArray()) for row in binary.collect()] == [[1, 0], [0, 1]]
    dense = DenseTransformer("v", "d").transform(frame).first().d
    assert type(dense).__name__ == "DenseVector"
    np.testing.assert_array_equal(dense.toArray(), [0, 10, 0, 4])
    square = ReshapeTransformer("v", "s", (2, 2)).transform(frame)
    assert [row.s for row in square.collect()] == [[[0, 10], [0, 4]], [[0, 2], [4, 6]]]
    deep = ReshapeTransformer("v", "s", (2, 2, 1)).transform(frame).first().s
    assert deep == [[[0], [10]], [[0], [4]]]
    with pytest.raises(Exception, match="expected 3 values per row; received 4"):
        ReshapeTransformer("v", "s", (3, 1)).transform(frame).collect()
    scaled = StandardTransformer(["x"]).transform(frame)
    assert [row.x_normalized for row in scaled.collect()] == [-1.0, 1.0]
    with pytest.raises(DataError, match="no standard deviation"):
        StandardTransformer(["x"]).transform(frame.where("x = 1"))


def test_transformers_of_labels(spark: Any) -> None:
    frame = spark.range(3).select(F.col("id").cast("double").alias("a.b"))
    hot = OneHotTransformer(3, "a.b", "hot").transform(frame)
    assert [row.hot for row in hot.collect()] == np.eye(3).tolist()
    with pytest.raises(Exception, match=r"class from 0 to 1; received 2"):
        OneHotTransformer(2, "a.b", "hot").transform(frame).collect()
    outputs = spark.createDataFrame(
        [(Vectors.dense(0.1, 0.2, 0.15),), (Vectors.dense(0.6, 0.9, 0.0),),
         (Vectors.dense(-1.0, -2.0, 0.0),)],
        ["prediction"],
    )  # fmt: skip
    found = LabelIndexTransformer(3, default_index=2).transform(outputs)
    assert [row.prediction_index for row in found.collect()] == [1.0, 0.0, 2.0]
    arrays = spark.createDataFrame([([0.1, 0.7],)], "prediction array<float>")
    assert LabelIndexTransformer(2).transform(arrays).first().prediction_index == 1.0
    with pytest.raises(DataError, match="no rows to evaluate"):
        AccuracyEvaluator("a.b", "a.b").evaluate(frame.where("false"))
