"""A checkpoint of a network that computes something else, though its weights would fit."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers

from sparkdl import SparkModel
from sparkdl.errors import ConfigError
from sparkdl.files.model_file import read_config
from sparkdl.learner.archives.archive import model_bytes
from sparkdl.learner.description import config_difference, optimizer_classes

pytestmark = pytest.mark.keras


def network(activation: Any = "relu", optimizer: Any = "sgd", **options: Any) -> Any:
    x = keras.Input((3,))
    hidden = layers.Dense(4, activation=activation, **options)(x)
    out = layers.Dense(1)(layers.Dropout(0.1)(layers.BatchNormalization()(hidden)))
    model = keras.Model(x, out)
    model.compile(optimizer, "mse")
    return model


def config(model: Any) -> bytes:
    return read_config(model_bytes(model))


def test_what_makes_another_network_of_the_same_shapes() -> None:
    saved = config(network())
    found = config_difference(saved, network("tanh"))
    assert found is not None
    place, before, now = found
    assert place.endswith("(Dense): activation")
    assert (before, now) == ("'relu'", "'tanh'")
    assert config_difference(config(network(use_bias=False)), network()) is not None
    assert config_difference(config(keras.Sequential([keras.Input((3,))])), network()) is not None


def test_what_makes_none() -> None:
    """Names, what weights begin with, what is frozen, and the address of a function."""
    saved = config(network())
    assert config_difference(saved, network(name="other", kernel_initializer="zeros")) is None
    frozen = network()
    frozen.layers[1].trainable = False
    assert config_difference(saved, frozen) is None
    saved = config(network(lambda x: x * 2))
    assert config_difference(saved, network(lambda x: x * 2)) is None


def test_classes_of_optimizers() -> None:
    saved = config(network(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())))
    assert optimizer_classes(saved, network()) == ("LossScaleOptimizer(Adam)", "SGD")
    assert optimizer_classes(config(network()), network()) == ("SGD", "SGD")


def test_two_fits_of_one_keras_model_in_two_spark_models() -> None:
    model = network()
    first, second = SparkModel(model), SparkModel(model)
    with first._trained.one_at_a_time("fit"):
        with pytest.raises(ConfigError, match="being trained by another call of fit"):
            second.fit(([[1.0, 2.0, 3.0]], [1.0]))
        with SparkModel(network())._trained.one_at_a_time("fit"):
            pass
    with second._trained.one_at_a_time("fit"):
        pass
