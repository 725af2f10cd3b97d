"""``prepare_model``: what several workers cannot follow is refused before a job starts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.config import FitConfig
from sparkdl.errors import ConfigError
from sparkdl.spark.fit.choice import choose_exchange
from sparkdl.spark.fit.plan import prepare_model

pytestmark = pytest.mark.keras
BACKEND = keras.backend.backend()
FOLLOWED = [
    ("synchronous", None, "auto", "raise"), ("synchronous", "bsp", 1, "raise"),
    ("allreduce", None, "auto", "ignore"), ("allreduce", "mean", "batch", "raise"),
]  # fmt: skip
REFUSED = [
    ("asynchronous", None, "auto", "raise"), ("asynchronous", "ensemble", "auto", "raise"),
    ("asynchronous", "geo", "auto", "raise"), ("hogwild", None, "auto", "raise"),
    ("synchronous", None, 4, "raise"), ("synchronous", None, "epoch", "raise"),
    ("synchronous", None, "auto", "skip"),
    ("allreduce", "adasum", "auto", "raise"), ("allreduce", "local_sgd", 4, "raise"),
    ("allreduce", "zero1", "auto", "raise"), ("allreduce", None, "auto", "skip"),
]  # fmt: skip


def norm(trainable: bool = True, wrapped: bool = False) -> Any:
    layer = keras.layers.BatchNormalization(trainable=trainable)
    layer.synchronized = True  # as Keras' argument, which it takes on TensorFlow alone
    inner = keras.layers.TimeDistributed(layer) if wrapped else layer
    shape = (2, 3) if wrapped else (3,)
    nested = keras.Sequential([keras.Input(shape), inner])
    model = keras.Sequential([keras.Input(shape), nested, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def prepare(model: Any, case: tuple[Any, ...], num_workers: int = 2) -> None:
    mode, rule, frequency, on_nan = case
    config = FitConfig(mode=mode, frequency=frequency, on_nan=on_nan)
    exchange = choose_exchange(config, rule, None, model.optimizer)
    prepare_model(model, config, exchange, num_workers)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_synchronized_layers_are_refused_where_nobody_follows_them(case: Any) -> None:
    with pytest.raises(ConfigError, match=r"synchronized=True(.|\n)*hint: synchronized=False"):
        prepare(norm(), case)
    prepare(norm(), case, num_workers=1)
    prepare(norm(trainable=False), case)  # it does not normalise by the batch


@pytest.mark.parametrize("case", FOLLOWED, ids=str)
def test_they_are_followed_in_exact_modes_on_tensorflow(case: Any) -> None:
    if BACKEND == "tensorflow":
        prepare(norm(), case)
    else:
        with pytest.raises(ConfigError, match=BACKEND):
            prepare(norm(), case)
    with pytest.raises(ConfigError, match=r"synchronized=True(.|\n)*TimeDistributed|" + BACKEND):
        prepare(norm(wrapped=True), case)


def helper(x: Any, synchronized: bool) -> Any:
    return keras.ops.moments(x, [0], synchronized=synchronized)[0]


class Centered(keras.layers.Layer):
    def __init__(self, synchronized: bool = True) -> None:
        super().__init__()
        self.synchronized = synchronized

    def call(self, x: Any, training: bool = False) -> Any:
        return x - helper(x, self.synchronized) if training else x


class Bare(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(x - keras.ops.moments(x, 0, False, True)[0])


def with_moments(kind: str, training: bool = True) -> Any:
    x = y = keras.Input((3,))
    if kind == "model":
        model = Bare()
        model(np.zeros((1, 3), "float32"))
    else:
        if kind == "operation":
            y = x - keras.ops.moments(x, [0], synchronized=True)[0]
        elif kind == "not yet":
            y = keras.layers.Lambda(lambda v: v if training else helper_to_come)(x)
        elif kind == "lambda":
            y = keras.layers.Lambda(lambda v: v - helper(v, True), output_shape=(3,))(x)
        else:
            y = Centered(kind == "layer")(x)
        model = keras.Model(x, keras.layers.Dense(1)(y))
    model.compile("sgd", "mse")
    if not training:
        helper_to_come = helper  # an empty cell of the lambda until here
    return model


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras has them on TensorFlow alone")
@pytest.mark.parametrize("kind", ["layer", "lambda", "operation", "model"])
def test_synchronized_moments_of_own_code_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"synchronized=True(.|\n)*received: a call of keras.ops"):
        prepare(with_moments(kind), FOLLOWED[0])
    prepare(with_moments(kind), FOLLOWED[0], num_workers=1)
    prepare(with_moments("unsynchronized"), REFUSED[0])
    prepare(with_moments("not yet"), REFUSED[0])
    prepare(norm(), FOLLOWED[0])
