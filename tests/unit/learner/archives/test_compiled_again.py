"""What a model is compiled with arrives: what a second compile left, equal names, functions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sparkdl.errors import ModelError
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.checks.compile_parts import require_loadable

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = X[:, :2]


def dense(**options: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), layers.Dense(2, **options)])


def same(model: Any) -> Any:
    """A worker's model, which trains and evaluates as the user's."""
    require_loadable(model)
    copy = decode_model(encode_model(model))
    for one in (model, copy):
        one.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(model.variables, copy.variables, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (mine, its)), atol=1e-6)
    wanted = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert copy.evaluate(X, Y, verbose=0, return_dict=True) == pytest.approx(wanted, abs=1e-6)
    return copy


def test_metrics_and_losses_that_a_second_compile_leaves_out_stay() -> None:
    """Keras keeps those of before: a History had an accuracy of 0."""
    model = dense()
    model.compile("sgd", "mae", metrics=["mse"])
    model.compile("adam", "mse")
    assert set(same(model).evaluate(X, Y, verbose=0, return_dict=True)) == {"loss", "mse"}
    model.compile("sgd", metrics=["mae"])
    assert set(same(model).evaluate(X, Y, verbose=0, return_dict=True)) == {"loss", "mae"}


@pytest.mark.skipif(not hasattr(keras, "distillation"), reason="since Keras 3.12")
def test_a_distiller_whose_files_keras_loads_without_compiling_them() -> None:
    """Keras is told of no loss: the class keeps it apart."""
    losses = [keras.distillation.LogitsDistillation(temperature=2.0, loss="mse")]
    model = keras.distillation.Distiller(dense(), dense(activation="relu"), losses)
    model.build((None, 6))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    assert {"mae", "student_loss", "distillation_loss"} <= set(
        same(model).evaluate(X, Y, verbose=0, return_dict=True)
    )
    assert keras.distillation.Distiller.compile_from_config is keras.Model.compile_from_config


def of_a_cell(text: str, name: str) -> Any:
    """What a cell of a notebook, which may be run again, gives a name to."""
    names: dict[str, Any] = {"keras": keras, "ops": ops, "__name__": "__main__"}
    exec(text, names)
    return names[name]


ERROR = "def error(t, p):\n    return {} * ops.mean(ops.square(t - p), axis=-1)"
ACT = "def act(v):\n    return ops.{}(v)"
LAYER = "class Scale(keras.layers.Layer):\n    def call(self, v):\n        return {} * v"
LOSS = (
    "class Error(keras.losses.Loss):\n    def call(self, t, p):\n"
    "        return {} * ops.mean(ops.square(t - p), axis=-1)"
)


def test_functions_and_classes_of_one_name_are_told_apart() -> None:
    """The last one of a name stood for all: losses and activations were silently another's."""
    acts = [of_a_cell(ACT.format(name), "act") for name in ("tanh", "relu")]
    scales = [of_a_cell(LAYER.format(factor), "Scale") for factor in (2.0, 0.5)]
    errors = [of_a_cell(ERROR.format(factor), "error") for factor in (1.0, 5.0)]
    losses = [of_a_cell(LOSS.format(factor), "Error") for factor in (1.0, 3.0)]
    keras.utils.set_random_seed(1)
    given = hidden = keras.Input((6,))
    for act, scale in zip(acts, scales, strict=True):
        hidden = scale()(layers.Dense(4, activation=act)(hidden))
    outputs = [layers.Dense(2, name=name)(hidden) for name in ("a", "b")]
    model = keras.Model(given, outputs)
    wanted = model.predict(X, verbose=0)
    for pair in (errors, [loss() for loss in losses]):
        model.compile("sgd", pair)
        copy = decode_model(encode_model(model))
        for mine, its in zip(wanted, copy.predict(X, verbose=0), strict=True):
            np.testing.assert_allclose(its, mine, atol=1e-6)
        told = model.evaluate(X, [Y, Y], verbose=0)
        assert copy.evaluate(X, [Y, Y], verbose=0) == pytest.approx(told, abs=1e-6)
    assert [act.__name__ for act in acts] == ["act", "act"]


def test_functions_as_regularizer_and_constraint() -> None:
    """A worker ended with Keras' error: "Expected a callable ... Received: __lambda__"."""
    model = dense(
        kernel_regularizer=lambda w: 0.1 * ops.sum(ops.square(w)),
        kernel_constraint=lambda w: ops.clip(w, -0.3, 0.3),
        bias_regularizer="l2",
    )
    model.compile("sgd", "mse")
    same(model)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, step: Any) -> Any:
        return self.start / (1 + ops.cast(step, "float32"))


def test_a_schedule_without_get_config_is_named() -> None:
    """Keras' NotImplementedError came through."""
    model = dense()
    model.compile(keras.optimizers.SGD(Falling(0.1)), "mse")
    with pytest.raises(ModelError, match="object Falling") as caught:
        require_loadable(model)
    assert "'start': self.start}" in caught.value.hint
