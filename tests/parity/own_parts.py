"""Classes and functions of a user's own, and callbacks, for the models of the parity tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops


class Scaled(layers.Layer):
    """A layer with a weight and a constructor's argument of its own."""

    def __init__(self, factor: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        super().build(shape)

    def call(self, x: Any) -> Any:
        return x * self.scale * ops.cast(self.factor, x.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


class Counting(layers.Layer):
    """Counts the batches that it was trained on, and computes with the count."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, name="count"
        )
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(1)
        return x * (1.0 + 0.01 * ops.cast(self.count, x.dtype))


class Tempered(layers.Layer):
    """Divides by a temperature that is not trained, which callbacks may change."""

    def build(self, shape: Any) -> None:
        self.temperature = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="temperature"
        )
        super().build(shape)

    def call(self, x: Any) -> Any:
        return x / ops.cast(self.temperature, x.dtype)


class Penalized(layers.Layer):
    """Adds a loss of its own: the mean square of what goes through it."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class Measuring(layers.Layer):
    """Has a metric of its own: the mean of what goes through it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.measured = keras.metrics.Mean(name="measured")

    def call(self, x: Any) -> Any:
        self.measured.update_state(ops.cast(x, "float32"))
        return x


class OwnLoss(keras.losses.Loss):
    """A mean squared error with an argument."""

    def __init__(self, power: float = 2.0, name: str = "own", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.power = power

    def call(self, y_true: Any, y_pred: Any) -> Any:
        difference = ops.abs(y_pred - ops.cast(y_true, y_pred.dtype))
        return ops.mean(ops.power(difference + 1e-3, self.power), axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "power": self.power}


def own_function(y_true: Any, y_pred: Any) -> Any:
    """A loss that is a function."""
    return ops.mean(ops.square(y_pred - ops.cast(y_true, y_pred.dtype)), axis=-1)


class MeanOutput(keras.metrics.Metric):
    """The mean of the outputs, weighted."""

    def __init__(self, name: str = "mean_output", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.number = self.add_variable((), "zeros", name="number")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = ops.mean(ops.reshape(y_pred, (ops.shape(y_pred)[0], -1)), axis=-1)
        values = ops.cast(values, self.dtype)
        if sample_weight is None:
            weights = ops.ones_like(values)
        else:
            weights = ops.cast(ops.reshape(sample_weight, (-1,)), self.dtype)
        self.total.assign_add(ops.sum(values * weights))
        self.number.assign_add(ops.sum(weights))

    def result(self) -> Any:
        return ops.divide_no_nan(self.total, self.number)


class Subclassed(keras.Model):
    """A model of one input whose layers are attributes.

    Args:
        stack: The layers, in order.
    """

    def __init__(self, stack: list[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stack = list(stack)

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.stack:
            takes = getattr(layer, "_call_has_training_arg", False)
            x = layer(x, training=training) if takes else layer(x)
        return x

    def get_config(self) -> dict[str, Any]:
        stack = [keras.saving.serialize_keras_object(layer) for layer in self.stack]
        return {**super().get_config(), "stack": stack}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        stack = [keras.saving.deserialize_keras_object(c) for c in config.pop("stack")]
        return cls(stack, **config)


class OwnStep(keras.Model):
    """A functional model whose loss is computed by ``compute_loss`` of its own."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.square(y_pred))


_CLASSES = (
    Scaled, Counting, Tempered, Penalized, Measuring, OwnLoss, MeanOutput, Subclassed, OwnStep,
)  # fmt: skip
CUSTOM = {c.__name__: c for c in _CLASSES} | {"own_function": own_function}


# -- callbacks -------------------------------------------------------------------------------------


class Reads(keras.callbacks.Callback):
    """Keeps what it sees: the methods that were called, their metrics, the sum of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append(("train begin", sorted(logs or {})))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(("epoch begin", epoch, sorted(logs or {})))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        total = sum(float(np.abs(w).sum()) for w in self.model.get_weights())
        self.seen.append(("epoch end", epoch, sorted(logs or {}), total))

    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append(("train end", sorted(logs or {})))


class Halves(keras.callbacks.Callback):
    """Halves all kernels after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            for variable in self.model.trainable_variables:
                if "kernel" in variable.path:
                    variable.assign(variable * 0.5)


class Warms(keras.callbacks.Callback):
    """Raises the temperature of each such layer at the beginning of an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for layer in self.model.layers:
            if isinstance(layer, Tempered):
                layer.temperature.assign(1.0 + 0.5 * epoch)


CALLBACKS: dict[str, Callable[[], Any]] = {
    "reads": Reads,
    "rates": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=0, min_delta=10.0),
    "stops": lambda: keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1),
    "restores": lambda: keras.callbacks.EarlyStopping(
        "loss", min_delta=10.0, patience=1, restore_best_weights=True
    ),
    "nan": keras.callbacks.TerminateOnNaN,
    "halves": Halves,
    "warms": Warms,
    "swaps": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
}
