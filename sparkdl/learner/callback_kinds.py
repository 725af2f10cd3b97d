"""The kinds of callbacks, as far as they can be told before they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from sparkdl.user_warnings import warn_user

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


def warn_of_waiting_in_vain(callbacks: Iterable[Any], *, validates: bool) -> None:
    """Warns of callbacks of Keras that act on a ``val_`` metric, where nothing is validated.

    Args:
        callbacks: The user's.
        validates: Whether there are rows to validate on.
    """
    for callback in () if validates else callbacks:
        monitor = getattr(callback, "monitor", None)
        best = getattr(callback, "save_best_only", True)
        of_keras = type(callback).__module__.startswith("keras.")
        if of_keras and best and isinstance(monitor, str) and monitor.startswith("val_"):
            warn_user(
                f"{type(callback).__name__} acts on {monitor!r}, which there is not without "
                "validation_data or validation_split: it will do nothing; "
                f"monitor={monitor.removeprefix('val_')!r} is the metric of the training rows"
            )
