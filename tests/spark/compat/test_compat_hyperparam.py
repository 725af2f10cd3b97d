"""Elephas' HyperParamModel: its own test's program, on small data, with Keras 3's names."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from sparkdl.compat.elephas.hyperparam import HyperParamModel
from sparkdl.errors import ConfigError, SparkDLError

choice = uniform = loguniform = None  # imported from hyperas.distributions in users' programs


def data() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype("float32")
    y = np.eye(2)[(x[:, 0] > x[:, 1]).astype(int)]
    return x[:200], y[:200], x[200:], y[200:]


def model(x_train: Any, y_train: Any, x_test: Any, y_test: Any) -> Any:
    import keras

    network = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense({{choice([4, 16])}}, activation="relu"),
            keras.layers.Dropout({{uniform(0, 0.5)}}),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    rate = {{loguniform(-9, -2)}}
    network.compile(keras.optimizers.Adam(rate), "categorical_crossentropy", metrics=["accuracy"])
    network.fit(x_train, y_train, batch_size={{choice([16, 32])}}, epochs=4, verbose=0)
    _, accuracy = network.evaluate(x_test, y_test, verbose=0)
    return {"loss": -accuracy, "status": "ok", "model": network.to_json(),
            "weights": pickle.dumps(network.get_weights())}  # fmt: skip


def test_elephas_own_program(spark: Any) -> None:
    search = HyperParamModel(spark.sparkContext, num_workers=2)
    (trials,) = search.compute_trials(model=model, data=data, max_evals=2)
    assert [t["tid"] for t in trials] == [0, 1, 2, 3]
    assert all(set(t["params"]) == {"Dense", "Dropout", "value", "batch_size"} for t in trials)
    losses = sorted(t["result"]["loss"] for t in trials)
    assert losses[0] < losses[-1]
    best = search.minimize(model=model, data=data, max_evals=2)
    x, y = data()[2:]
    predicted = best.predict(x, verbose=0)
    accuracy = (predicted.argmax(1) == y.argmax(1)).mean()
    assert accuracy == pytest.approx(-losses[0], abs=1e-6)  # the same trials, their best model


def returns_the_model(x: Any) -> Any:
    import keras

    network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
    network.compile("adam", "categorical_crossentropy")
    if {{choice([True, False, False])}}:
        raise ValueError("this trial fails")
    return {"loss": float(network.predict(x, verbose=0)[:, 0].mean()), "model": network}


def test_models_that_vote_and_trials_that_fail(spark: Any) -> None:
    search = HyperParamModel(spark, num_workers=2, seed=1)
    x = np.eye(2, dtype="float32")
    with pytest.warns(RuntimeWarning, match="this trial fails"):
        together = search.best_ensemble(2, returns_the_model, lambda: x, 2, voting="soft")
    votes = together.predict(x, verbose=0)
    np.testing.assert_allclose(votes.sum(1), 1, atol=1e-6)
    with pytest.raises(ConfigError, match="'hard', 'soft'"):
        search.best_ensemble(2, returns_the_model, lambda: x, 2, voting="loud")
    with pytest.raises(ConfigError, match="weights=None"):
        search.best_ensemble(2, returns_the_model, lambda: x, 2, weights=[1, 2])


def returns_nothing(x: Any) -> None:
    return None


def test_a_function_without_a_loss(spark: Any) -> None:
    with pytest.raises(SparkDLError, match=r"(?s)compared by.*expected: \{'loss'"):
        HyperParamModel(spark, num_workers=1).minimize(returns_nothing, lambda: 1, 1)
