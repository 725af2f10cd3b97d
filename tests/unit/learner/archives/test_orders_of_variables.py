"""Variables find their own values and slots, whatever order another process makes them in.

Names in a set of texts have another order in each process (``PYTHONHASHSEED``); here ``ORDER`` says
which.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.errors import ModelError
from sparkdl.learner.archives import rebuilt
from sparkdl.learner.archives.archive import decode_model, encode_model, restore_state

layers, ops = keras.layers, keras.ops
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def names() -> list[str]:
    return sorted(["first", "second", "third"], reverse=bool(os.environ.get("ORDER")))


class InDict(keras.Model):
    """Layers with seeds and running statistics by name, called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = {name: layers.Dense(6, activation="tanh") for name in names()}
        self.rest = {
            name: [layers.BatchNormalization(), layers.Dropout(0.5, seed=3)] for name in names()
        }  # fmt: skip
        self.told = {name: keras.metrics.Mean(name) for name in names()}

    def call(self, x: Any, training: bool = False) -> Any:
        for place, name in enumerate(sorted(self.dense)):
            x = self.dense[name](x)
            for layer in self.rest[name]:
                x = layer(x, training=training)
            if keras.backend.backend() != "jax":  # whose step traces it outside of Keras' scopes
                self.told[name].update_state(x + place)
        return x

    def get_config(self) -> dict[str, Any]:
        return {}


class InOrderOfDict(InDict):
    """Calls its layers in the dict's own order."""

    def call(self, x: Any, training: bool = False) -> Any:
        for name, layer in self.dense.items():
            x = layer(x)
            for other in self.rest[name]:
                x = other(x, training=training)
        return x


class AsAttributes(keras.Model):
    """Layers as attributes, in the order of names that a set has; hidden ones, too."""

    def __init__(self) -> None:
        super().__init__()
        for name in names():
            setattr(self, f"_{name}", layers.Dense(6, activation="tanh"))

    def call(self, x: Any) -> Any:
        return self._third(self._second(self._first(x)))

    def get_config(self) -> dict[str, Any]:
        return {}


class Lazy(keras.Model):
    """Makes each layer when it is asked for first: in ``build``."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Any] = {}

    def part(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = layers.Dense(6, activation="tanh")
        return self.made[name]

    def build(self, shape: Any) -> None:
        for name in names():
            self.part(name).build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.part("third")(self.part("second")(self.part("first")(x)))

    def get_config(self) -> dict[str, Any]:
        return {}


class Weights(layers.Layer):
    """Weights without names, in a dict."""

    def build(self, shape: Any) -> None:
        self.factors = {name: self.add_weight(shape=(6,)) for name in names()}
        self.counts = {
            name: self.add_weight(shape=(), dtype="int32", trainable=False) for name in names()
        }

    def call(self, x: Any) -> Any:
        x = ops.tanh(x * self.factors["first"] + self.factors["second"])
        return x * self.factors["third"] + ops.cast(self.counts["second"], "float32")


def in_a_functional() -> Any:
    inputs = keras.Input((6,))
    inner = Weights()
    return keras.Model(inputs, layers.Dense(6)(inner(layers.Dense(6)(inner(inputs)))))


class Replaced(AsAttributes):
    """A layer that was replaced after the model was made is its last."""

    def __init__(self) -> None:
        super().__init__()
        if not os.environ.get("ORDER"):
            first, self._first = self._first, None
            self._layers.remove(first)
            self._first = layers.Dense(6, activation="tanh")


KINDS = [InDict, InOrderOfDict, AsAttributes, Lazy, in_a_functional, Replaced]


def trained(make: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = make()
    model(X)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    for variable in model.variables:
        if variable.dtype == "int32" and variable.shape == ():
            variable.assign(3)
    model.fit(X, X[::-1], epochs=2, verbose=0)
    return model


def outputs(model: Any) -> np.ndarray:
    return np.asarray(model.predict(X, verbose=0))


def same(model: Any, other: Any) -> None:
    for mine, its in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(*(ops.convert_to_numpy(v.value) for v in (mine, its)))
    for mine, its in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(*(ops.convert_to_numpy(v.value) for v in (mine, its)))
    np.testing.assert_allclose(outputs(model), outputs(other), atol=1e-6)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_another_process_makes_them_in_another_order(
    make: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # as of models whose values are not compared on the driver, nor sent beside the file
        monkeypatch.setattr(rebuilt, "LARGE_BYTES", 0)
        monkeypatch.setattr("sparkdl.learner.state.carried_state.SMALL", 1)
    model = trained(make)
    archive = encode_model(model)
    monkeypatch.setenv("ORDER", "1")
    copy = decode_model(archive)
    same(model, copy)
    np.testing.assert_allclose(
        outputs(decode_model(archive, compiled=False)), outputs(model), atol=1e-6
    )
    found, wanted = (
        m.fit(X, X[::-1], batch_size=4, shuffle=False, verbose=0).history for m in (copy, model)
    )
    monkeypatch.delenv("ORDER")
    for name in wanted:  # metrics, too
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)
    for mine, its in zip(model.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5)
    archive = encode_model(model)
    copy.set_weights([0 * value for value in copy.get_weights()])
    restore_state(copy, archive)  # of a model that is kept
    same(model, copy)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_driver_itself_makes_them_in_another_order(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(make)
    monkeypatch.setenv("ORDER", "1")
    same(model, decode_model(encode_model(model)))


def test_equal_models_have_equal_keys() -> None:
    one, other = (trained(in_a_functional) for _ in range(2))
    assert encode_model(one).key == encode_model(other).key


class InSet(AsAttributes):
    def __init__(self) -> None:
        super().__init__()
        self.branches = {layers.Dense(6), layers.Dense(6)}

    def call(self, x: Any) -> Any:
        for layer in self.branches:
            x = layer(x)
        return x


def test_layers_in_a_set_are_refused() -> None:
    with pytest.raises(ModelError, match=r"another one on the workers[\s\S]*branches, a set"):
        encode_model(trained(InSet))


class More(AsAttributes):
    """Has a layer more in another process."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("ORDER"):
            self.extra = layers.Activation("tanh")


def test_what_only_another_process_makes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = encode_model(trained(More))
    monkeypatch.setenv("ORDER", "1")
    with pytest.raises(ModelError, match=r"\['extra'\] in place of nothing, in _layers"):
        decode_model(archive)
