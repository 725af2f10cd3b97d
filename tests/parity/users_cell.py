"""The code of a user's notebook: a session runs this text as cells of ``__main__``, and changes it.

Nothing imports it: :mod:`session` executes its text, so that its functions and classes belong to no
module that a worker could import. ``beside`` is a module of the user's, in a folder that only the
driver knows.
"""

from __future__ import annotations

from typing import Any

import beside
import keras
from keras import ops

ALPHA = 1.0
TABLE = {"beta": 1.0}


def innermost(t: Any, p: Any) -> Any:
    return ALPHA * ops.square(t - p)


def helper(t: Any, p: Any) -> Any:
    return innermost(t, p)


def by_global(t: Any, p: Any) -> Any:
    return ALPHA * ops.mean(ops.square(t - p), axis=-1)


def by_helpers(t: Any, p: Any) -> Any:
    return ops.mean(helper(t, p), axis=-1)


def by_table(t: Any, p: Any) -> Any:
    return TABLE["beta"] * ops.mean(ops.square(t - p), axis=-1)


def by_default(t: Any, p: Any, *, scale: float = ALPHA) -> Any:
    return scale * ops.mean(ops.square(t - p), axis=-1)


def by_module(t: Any, p: Any) -> Any:
    return beside.RATE * beside.error(t, p)


def closed_over(scale: float) -> Any:
    kept = [scale]

    def by_closure(t: Any, p: Any) -> Any:
        return kept[0] * ops.mean(ops.square(t - p), axis=-1)

    return by_closure


class OwnLoss(keras.losses.Loss):
    factor = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.factor * ops.mean(ops.square(y_pred - y_true), axis=-1)


class OwnMetric(keras.metrics.Mean):
    factor = 1.0

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        values = self.factor * ops.mean(ops.abs(y_true - y_pred), axis=-1)
        return super().update_state(values, sample_weight)


def own_metric(t: Any, p: Any) -> Any:
    return ALPHA * ops.mean(ops.abs(t - p), axis=-1)


def act(v: Any) -> Any:
    return ops.tanh(ALPHA * v)


curve = lambda v: ops.tanh(ALPHA * v)  # noqa: E731


def shifted(v: Any) -> Any:
    return v + 0.1 * TABLE["beta"]


class ByGlobal(keras.layers.Layer):
    def call(self, v: Any) -> Any:
        return v * ALPHA


class ByHelper(keras.layers.Layer):
    def call(self, v: Any) -> Any:
        return shifted(v)


class ByModule(keras.layers.Layer):
    def call(self, v: Any) -> Any:
        return beside.scaled(v)


class Scaled(keras.layers.Layer):
    factor = 1.0

    def call(self, v: Any) -> Any:
        return v * self.factor


class Derived(Scaled):
    def call(self, v: Any) -> Any:
        return super().call(v) + 0.1


class Network(keras.Model):
    gain = 1.0

    def __init__(self, stack: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stack = list(stack)

    def call(self, x: Any) -> Any:
        for layer in self.stack:
            x = layer(x)
        return x * self.gain

    def get_config(self) -> dict[str, Any]:
        stack = [keras.saving.serialize_keras_object(layer) for layer in self.stack]
        return {**super().get_config(), "stack": stack}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        stack = [keras.saving.deserialize_keras_object(c) for c in config.pop("stack")]
        return cls(stack, **config)


class Weighing(keras.Model):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        return ALPHA * super().compute_loss(x, y, y_pred, sample_weight, training)
