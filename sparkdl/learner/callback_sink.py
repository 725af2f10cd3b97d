"""Keras callbacks as a sink of a fit's events; on the driver."""

from __future__ import annotations

from typing import Any

import keras

from sparkdl.progress.events import (
    EpochBegan,
    EpochEnded,
    EpochProgressed,
    Event,
    TrainingBegan,
    TrainingEnded,
)


def at_least_one(callbacks: Any) -> Any:
    """``callbacks``, or one that does nothing: with it the driver has the weights of each epoch's
    end, and workers wait there until it has looked."""
    return callbacks or [keras.callbacks.Callback()]


class CallbackSink:
    """Calls the user's Keras callbacks, and keeps Keras' ``History``.

    Batch events come whenever the workers report something new (several times a second), not once
    per batch. Callbacks may set the learning rate of the model's optimizer, and
    ``model.stop_training``.

    Args:
        model: The driver's compiled model.
        callbacks: The user's, or None.
        epochs: Epoch to stop at.
        verbose: What callbacks find in ``params``.
    """

    def __init__(self, model: Any, callbacks: Any, *, epochs: int, verbose: int) -> None:
        self._model = model
        self.has_callbacks = bool(callbacks)
        self._callbacks = keras.callbacks.CallbackList(
            callbacks, add_history=True, add_progbar=False, model=model,
            verbose=verbose, epochs=epochs, steps=None,
        )  # fmt: skip

    @property
    def wants_progress(self) -> bool:
        """Whether there are callbacks to have batch events."""
        return self.has_callbacks

    def handle(self, event: Event) -> None:
        """Calls the methods of the callbacks that the event stands for."""
        match event:
            case TrainingBegan():
                self._model.stop_training = False
                self._callbacks.on_train_begin()
            case EpochBegan():
                self._callbacks.on_epoch_begin(event.epoch)
            case EpochProgressed():
                self._callbacks.on_train_batch_begin(event.batches - 1)
                self._callbacks.on_train_batch_end(event.batches - 1, dict(event.metrics))
            case EpochEnded():
                self._callbacks.on_epoch_end(event.epoch, dict(event.metrics))
            case TrainingEnded():
                self._callbacks.on_train_end()
            case _:
                pass

    @property
    def stop_wanted(self) -> bool:
        """Whether a callback has set ``model.stop_training``."""
        return bool(self._model.stop_training)

    @property
    def learning_rate(self) -> float | None:
        """The optimizer's learning rate; None if it is a schedule."""
        optimizer = self._model.optimizer
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is None or isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
        return float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    @property
    def history(self) -> Any:
        """Keras' ``History`` of this fit."""
        return self._model.history
