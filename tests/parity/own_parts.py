"""Classes and functions of a user's own, and callbacks, for the models of the parity tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
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
        return loss + 0.1 * ops.mean(ops.square(ops.cast(y_pred, loss.dtype)))


class OwnMean(keras.Model):
    """A functional model that divides the sum of its loss by the rows of the batch itself."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss / ops.cast(ops.shape(y_pred)[0], loss.dtype)


class OwnSum(keras.Model):
    """A functional model whose loss is a sum over rows that no loss of Keras tells of."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        return ops.sum(ops.square(y_pred - y))


class OwnMetrics(keras.Model):
    """A functional model that shows a value of its own beside its metrics, and leaves one out."""

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        logs = dict(super().compute_metrics(x, y, y_pred, sample_weight))
        logs.pop("root_mean_squared_error", None)
        return {**logs, "twice": 2.0 * logs["loss"]}


class OwnTrain(keras.Model):
    """A functional model with a ``train_step`` of its own.

    Its loss is another one for labels ``(n,)`` than for ``(n, 1)``.
    """

    def _own_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        outputs = ops.cast(y_pred, loss.dtype)
        return loss * (1.0 + 0.1 * len(y.shape)) + 0.1 * ops.mean(ops.square(outputs))

    def _logs(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, loss: Any) -> Any:
        rows = ops.cast(ops.shape(y_pred)[0], "float32")
        self._loss_tracker.update_state(loss, sample_weight=rows)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def train_step(self, *given: Any) -> Any:
        return getattr(self, f"_{keras.backend.backend()}_step")(*given)

    def _tensorflow_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self._own_loss(x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._logs(x, y, y_pred, sample_weight, loss)

    def _torch_step(self, data: Any) -> Any:
        import torch

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self._own_loss(x, y, y_pred, sample_weight)
        self.optimizer.scale_loss(loss).backward()
        variables = list(self.trainable_variables)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
            return self._logs(x, y, y_pred, sample_weight, loss)

    def _jax_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, frozen, slots, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

        def forward(trainable: Any) -> Any:
            pairs = [
                *zip(self.trainable_variables, trainable, strict=True),
                *zip(self.non_trainable_variables, frozen, strict=True),
            ]
            with keras.StatelessScope(state_mapping=pairs) as scope:
                y_pred = self(x, training=True)
                loss = self._own_loss(x, y, y_pred, sample_weight)
                scaled = self.optimizer.scale_loss(loss)
            changed = [scope.get_current_value(v) for v in self.non_trainable_variables]
            return scaled, (loss, y_pred, changed)

        (_, (loss, y_pred, frozen)), gradients = jax.value_and_grad(forward, has_aux=True)(
            trainable
        )
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        pairs = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:
            logs = self._logs(x, y, y_pred, sample_weight, loss)
        metrics = [scope.get_current_value(v) for v in self.metrics_variables]
        return logs, (trainable, frozen, slots, metrics)


_CLASSES = (
    Scaled, Counting, Tempered, Penalized, Measuring, OwnLoss, MeanOutput, Subclassed, OwnStep,
    OwnMean, OwnMetrics, OwnSum, OwnTrain,
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


class Checkpoints(keras.callbacks.ModelCheckpoint):
    """Keeps the weights that ``ModelCheckpoint`` wrote, by file.

    Args:
        ending: Of the files.
    """

    def __init__(self, ending: str, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(f"{self._folder.name}/{{epoch}}{ending}", **options)

    def files(self) -> dict[str, list[np.ndarray]]:
        """Name of a file -> the weights in it. Removes the files."""
        found = {}
        for path in sorted(Path(self._folder.name).iterdir()):
            if self.save_weights_only:
                self.model.load_weights(path)
                found[path.name] = self.model.get_weights()
            else:
                loaded = keras.models.load_model(path, custom_objects=CUSTOM, safe_mode=False)
                found[path.name] = [*loaded.get_weights(), *(v.numpy() for v in _slots(loaded))]
        self._folder.cleanup()
        return found


def _slots(model: Any) -> list[Any]:
    return [v for v in model.optimizer.variables if "seed" not in v.path]


CALLBACKS: dict[str, Callable[[], Any]] = {
    "checkpoints": lambda: Checkpoints(".keras"),
    "weights": lambda: Checkpoints(".weights.h5", save_weights_only=True),
    "best": lambda: Checkpoints(".keras", monitor="loss", save_best_only=True),
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
