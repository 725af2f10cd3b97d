"""What callbacks may do, as far as it can be told before they run."""

from __future__ import annotations

from typing import Any

import keras

_READ_LOGS = (
    keras.callbacks.Callback,
    keras.callbacks.History,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)
_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


def may_act(callback: Any) -> bool:
    """Whether a callback may write to the model, or wants the weights that its logs are of.

    Keras' own that only read logs, or stop, do neither; of others nobody knows.
    """
    if type(callback) is keras.callbacks.EarlyStopping:
        return bool(callback.restore_best_weights)
    return type(callback) not in _READ_LOGS


def acts_on_batches(callback: Any) -> bool:
    """Whether a callback has code of its own for batches, and may write to the model there."""
    plain = keras.callbacks.Callback
    own = any(
        getattr(type(callback), name, None) is not getattr(plain, name) or name in vars(callback)
        for name in _BATCH_EVENTS
    )
    return own and may_act(callback)


def waits_for_validation(callback: Any) -> str | None:
    """The ``val_`` metric that a callback of Keras acts on; None for none."""
    monitor = getattr(callback, "monitor", None)
    watches = isinstance(monitor, str) and monitor.startswith("val_")
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        watches = watches and callback.save_best_only
    return monitor if watches and type(callback).__module__.startswith("keras.") else None
