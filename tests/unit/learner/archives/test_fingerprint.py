"""Models that compile to the same steps have one key, others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl.learner.archives.archive import encode_model
from sparkdl.learner.cache import cached_learner, forget_learner
from sparkdl.learner.state.model_weights import read_model


def small(units: int = 4, activation: str = "relu", name: str | None = None) -> Any:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(units, activation=activation, name=name),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC()])
    return model


def branched(shared: bool) -> Any:
    """One input, two hidden layers; either the second feeds on the first, or on the input."""
    x = keras.Input((3,))
    first = layers.Dense(3)(x)
    second = layers.Dense(3)(first if shared else x)
    model = keras.Model(x, layers.Add()([first, second]))
    model.compile("sgd", "mse")
    return model


def two_inputs() -> Any:
    a, b = keras.Input((3,)), keras.Input((3,))
    model = keras.Model([a, b], layers.Dense(1)(layers.Concatenate()([a, b])))
    model.compile("sgd", "mse")
    return model


def two_outputs() -> Any:
    x = keras.Input((3,))
    outputs = [layers.Dense(1)(x), layers.Dense(1)(x)]
    model = keras.Model(x, outputs)
    model.compile("sgd", ["mse", "mse"])
    return model


def key(model: Any) -> str:
    return encode_model(model).key


@pytest.mark.parametrize("make", [small, lambda: branched(True), lambda: branched(False)])
def test_names_that_keras_gives_do_not_count(make: Callable[[], Any]) -> None:
    assert key(make()) == key(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (small, lambda: small(units=5)),
        (small, lambda: small(activation="tanh")),
        (small, lambda: small(name="mine")),
        (lambda: small(name="mine"), lambda: small(name="other")),
        (lambda: branched(True), lambda: branched(False)),
    ],
)
def test_what_makes_another_model_counts(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert key(one()) != key(other())


@pytest.mark.parametrize("make", [two_inputs, two_outputs])
def test_names_that_data_go_by_count(make: Callable[[], Any]) -> None:
    assert key(make()) != key(make())


def test_a_kept_model_takes_the_weights_of_its_equal() -> None:
    one, other = small(), small()
    x, y = np.ones((8, 3), np.float32), np.arange(8) % 2
    other.fit(x, y, epochs=2, verbose=0)
    first = cached_learner(encode_model(one))
    try:
        again = cached_learner(encode_model(other))
        assert again is first
        np.testing.assert_array_equal(
            read_model(again.model, again.layout), read_model(other, again.layout)
        )
        assert again.optimizer.step == 2
    finally:
        forget_learner(encode_model(one))
