"""What a model has beside its configuration arrives: layers held twice, attributes, orders."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.errors import ModelError
from sparkdl.learner.archives import rebuilt
from sparkdl.learner.archives.archive import (
    decode_model,
    encode_model,
    model_bytes,
    model_from_bytes,
)
from sparkdl.learner.checks.compile_parts import require_loadable
from sparkdl.learner.steps.keras_learner import require_compiled

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def inside_and_outside() -> Any:
    inputs, shared = keras.Input((6,)), layers.Dense(6, activation="tanh")
    sub = keras.Model(inputs, shared(inputs))
    return keras.Model(inputs, layers.Dense(2)(shared(shared(sub(inputs)))))


def submodels_share() -> Any:
    inputs, shared = keras.Input((6,)), layers.Dense(3)
    one, two = (keras.Model(inputs, layers.Activation(a)(shared(inputs))) for a in ("tanh", "relu"))
    other = keras.Input((6,))
    return keras.Model(other, layers.Dense(2)(layers.Concatenate()([one(other), two(other)])))


def wrapped() -> Any:
    inputs, shared = keras.Input((6,)), layers.Dense(3)
    steps = layers.Flatten()(layers.TimeDistributed(shared)(layers.Reshape((2, 3))(inputs)))
    picked = shared(layers.Dense(3, use_bias=False)(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()([steps, picked])))


def in_a_sequential() -> Any:
    inputs, shared = keras.Input((6,)), layers.Dense(6, activation="tanh")
    block = keras.Sequential([keras.Input((6,)), shared])
    return keras.Model(inputs, layers.Dense(2)(shared(block(inputs))))


def a_submodel_twice() -> Any:
    inputs = keras.Input((6,))
    inner = keras.Model(inputs, layers.Dense(6, activation="tanh")(inputs))
    outer = keras.Model(inputs, layers.Dense(6)(inner(inputs)))
    return keras.Model(inputs, layers.Dense(2)(inner(outer(inputs))))


@pytest.mark.parametrize(
    "make", [inside_and_outside, submodels_share, wrapped, in_a_sequential, a_submodel_twice]
)
def test_layers_that_several_hold(make: Any) -> None:
    model = make()
    model.compile("adam", "mse")
    model.fit(X, X[:, :2], verbose=0)
    same = decode_model(encode_model(model))
    loaded = model_from_bytes(model_bytes(model), None, safe_mode=True, path="m.keras")
    for other in (same, loaded):
        assert len(other.trainable_variables) == len(model.trainable_variables)
        np.testing.assert_allclose(other.predict(X, verbose=0), model.predict(X, verbose=0), 1e-6)
        other.fit(X, X[:, :2], verbose=0)
    model.fit(X, X[:, :2], verbose=0)
    np.testing.assert_allclose(same.get_weights()[0], model.get_weights()[0], atol=1e-6)


class Box:
    def __init__(self, value: float) -> None:
        self.value = value


class Scale(keras.layers.Layer):
    """Multiplies by what it holds, which its configuration does not name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tensor, self.box = keras.ops.convert_to_tensor(2.0), Box(2.0)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            self.held: Any = tf.Variable(2.0)
        elif keras.backend.backend() == "torch":
            import torch

            self.register_buffer("held", torch.tensor(2.0))
        else:
            self.held = keras.ops.convert_to_tensor(2.0)

    def call(self, x: Any) -> Any:
        return x * self.tensor * self.box.value * self.held


def test_tensors_and_objects_that_were_set_later() -> None:
    scale = Scale()
    model = keras.Sequential([keras.Input((6,)), scale])
    scale.tensor, scale.box = keras.ops.convert_to_tensor(3.0), Box(5.0)
    if hasattr(scale.held, "assign"):
        scale.held.assign(7.0)
    else:
        scale.held = scale.tensor + 4.0
    for _ in range(2):  # the second finds what the first has kept
        same = decode_model(encode_model(model, {"Scale": Scale}))
        np.testing.assert_allclose(same.predict(X, verbose=0), 105 * X, rtol=1e-6)
        scale.box = Box(5.0)


class Candidates(layers.Layer):
    """As ``BruteForceRetrieval`` of KerasRS: it gets its variables when the model is trained."""

    table: Any = None

    def update(self, values: Any) -> None:
        if self.table is None:
            self.table = keras.Variable(values, trainable=False, name="table")
        else:
            self.table.assign(values)

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.table)


class Retrieval(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.retrieval = layers.Dense(3), Candidates()

    def call(self, x: Any) -> Any:
        x = self.tower(x)
        return x if self.retrieval.table is None else self.retrieval(x)


@pytest.mark.parametrize("large", [False, True])
def test_variables_that_a_layer_got_after_training_travel(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # values are not compared then
        monkeypatch.setattr(rebuilt, "LARGE_BYTES", 0)
        monkeypatch.setattr(rebuilt, "_known", type(rebuilt._known)())
    model = Retrieval()
    model(X)
    model.compile("adam", "mse")
    model.fit(X, X[:, :3], verbose=0)
    for seed in (1, 2):
        model.retrieval.update(np.random.default_rng(seed).normal(size=(3, 5)))
        same = decode_model(encode_model(model))
        mine, its = (m.predict(X, verbose=0) for m in (model, same))
        assert its.shape == (8, 5)
        np.testing.assert_allclose(mine, its, atol=1e-6)
        assert [v.trainable for v in same.variables] == [True, True, False]
    same.retrieval.update(np.zeros((3, 5)))  # goes on as on the driver
    assert not same.predict(X, verbose=0).any()


def test_a_layer_that_was_quantized_to_float8() -> None:
    """Keras makes its variables in another order when it loads them."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(2)])
    model.quantize("float8")
    model.compile("adam", "mse")
    model.fit(X, X[:, :2], verbose=0)
    same = decode_model(encode_model(model))
    paths = [[v.path.rpartition(f"{m.name}/")[2] for v in m.variables] for m in (same, model)]
    assert paths[0] == paths[1]  # a Sequential that was built by its layers has no name in them
    for mine, its in zip(model.variables, same.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), its.numpy())
    for mine, its in zip(model.optimizer.variables, same.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), its.numpy())


def test_a_trained_model_that_was_quantized() -> None:
    """The optimizer keeps what it had for the biases; Keras goes on with them."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(2)])
    model.compile("adam", "mse")
    model.fit(X, X[:, :2], verbose=0)
    momentum = model.optimizer._momentums[1].numpy()
    model.quantize("int8")
    same = decode_model(encode_model(model))
    assert len(same.optimizer.variables) == len(model.optimizer.variables) == 2 + 2 * 2
    np.testing.assert_array_equal(same.optimizer._momentums[0].numpy(), momentum)
    model.fit(X, X[:, :2], verbose=0)
    same.fit(X, X[:, :2], verbose=0)
    for mine, its in zip(model.get_weights(), same.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-6)


def test_variables_that_the_optimizer_does_not_know() -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    model.compile("adam", "mse")
    model.fit(X, X[:, :2], verbose=0)
    model.quantize("float8")
    with pytest.raises(ModelError, match=r"(?s)lacks variables.*inputs_scale.*compile"):
        require_compiled(model)


class Scaled(keras.Model):
    """A functional model of a class of the user's own, with an argument of compile more."""

    def __init__(self, units: int = 2, **named: Any) -> None:
        inputs = keras.Input((6,))
        self.units = units
        super().__init__(inputs, layers.Dense(units)(inputs), **named)
        self.compile("rmsprop", "mse")  # as a task of KerasHub is, when it is made

    def compile(
        self, optimizer: Any = "sgd", loss: Any = None, *, factor: float = 1.0, **kwargs: Any
    ) -> None:
        super().compile(optimizer=optimizer, loss=loss, **kwargs)
        self.factor = factor

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units, "name": self.name}


class Forgetful(Scaled):
    def compile(self, optimizer: Any = "sgd", loss: Any = None, *, kind: Any = None) -> None:
        super().compile(optimizer, loss)


def test_a_compile_of_the_users_own_is_called_with_what_it_was_given() -> None:
    model = Scaled(3)
    model.compile(keras.optimizers.Adam(0.5), "mae", factor=3.0, metrics=["mse"], jit_compile=False)
    model.fit(X, X[:, :3], verbose=0)
    require_loadable(model)
    copy = decode_model(encode_model(model))
    assert (copy.factor, copy.loss, float(copy.optimizer.learning_rate)) == (3.0, "mae", 0.5)
    assert int(copy.optimizer.iterations) == 1
    assert copy.get_compile_config()["metrics"] == ["mse"]
    predicting = decode_model(encode_model(model), compiled=False)
    assert (predicting.factor, predicting.optimizer) == (3.0, None)


def test_an_argument_of_compile_that_a_model_does_not_keep_is_refused() -> None:
    with pytest.raises(ModelError, match=r"compiled again[\s\S]*Forgetful.compile with kind"):
        require_loadable(Forgetful())


def test_adapters_and_frozen_layers_that_no_configuration_knows_travel() -> None:
    """A class that makes its layers itself writes of them no more than its own arguments."""
    model = Scaled(3)
    model.layers[-1].enable_lora(2)
    model.compile(keras.optimizers.Adam(), "mse")
    model.fit(X, X[:, :3], verbose=0)
    copy = decode_model(encode_model(model))
    assert [v.trainable for v in copy.variables] == [v.trainable for v in model.variables]
    for mine, its in zip(model.optimizer.variables, copy.optimizer.variables, strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (mine, its)))
    np.testing.assert_allclose(copy.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)
    other = Scaled(3)
    other.layers[-1]._trainable = False  # its variables stay trained
    other.compile(keras.optimizers.Adam(), "mse")
    assert decode_model(encode_model(other)).layers[-1]._trainable is False
