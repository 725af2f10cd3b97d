"""Keras callbacks as a sink of a fit's events; on the driver."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.callback_writes import WriteWatch, write_changes
from sparkdl.learner.state.optimizer_state import innermost_optimizer, optimizers_within
from sparkdl.process.user_warnings import warn_user
from sparkdl.progress.events import (
    EpochBegan,
    EpochEnded,
    EpochProgressed,
    Event,
    Metrics,
    TrainingBegan,
    TrainingEnded,
)
from sparkdl.training.changes import VariableChanges

_VALIDATION = "val_"


def at_least_one(callbacks: object) -> Any:
    """``callbacks``, or one that does nothing: with it the driver has the weights of each epoch's
    end, and workers wait there until it has looked."""
    return callbacks or [keras.callbacks.Callback()]


class CallbackSink:
    """Calls the user's Keras callbacks, and keeps Keras' ``History``.

    Batch events come whenever the workers report something new (several times a second), and once
    at an epoch's end; not once per batch. Callbacks may write variables of the model and of its
    optimizer, set the learning rate, and set ``model.stop_training``.

    Args:
        model: The driver's compiled model.
        callbacks: The user's, or None.
        epochs: Epoch to stop at.
        verbose: What callbacks find in ``params``.
        waits: Whether the workers wait at an epoch's end, so that the weights which callbacks see
            there are those that the workers go on with.
    """

    def __init__(
        self, model: keras.Model, callbacks: Any, *, epochs: int, verbose: int, waits: bool = True
    ) -> None:
        self._model = model
        self.has_callbacks = bool(callbacks)
        given = list(callbacks or [])
        self._callbacks = keras.callbacks.CallbackList(
            given, add_history=True, add_progbar=False, model=model,
            verbose=verbose, epochs=epochs, steps=None,
        )  # fmt: skip
        self._watch = WriteWatch(model) if any(map(may_act, given)) else None
        self._watches_batches = any(map(acts_on_batches, given))
        self._watches_validation = any(map(acts_on_validation, given))
        self._waits = waits
        self._written = VariableChanges()  # since the last take
        self._last_written = VariableChanges()  # since the weights were loaded last
        self._batches = 0  # of the present epoch that callbacks have seen
        self._logs: dict[str, Any] = {}

    @property
    def wants_progress(self) -> bool:
        """Whether there are callbacks to have batch events."""
        return self.has_callbacks

    def handle(self, event: Event) -> None:
        """Calls the methods of the callbacks that the event stands for.

        Raises:
            ModelError: A callback wrote what the workers cannot take.
        """
        match event:
            case TrainingBegan():
                self._model.stop_training = False
                self._callbacks.on_train_begin()
            case EpochBegan():
                self._batches = 0
                self._callbacks.on_epoch_begin(event.epoch)
            case EpochProgressed():
                self._show_batch(event.batches, event.batches_per_epoch, event.metrics)
            case EpochEnded():
                self._end_epoch(event)
            case TrainingEnded():
                self._callbacks.on_train_end(dict(self._logs))
                return
            case _:
                return
        if self._watch is not None:
            self._watch.check_parts()

    def _show_batch(self, batches: int, batches_per_epoch: int, metrics: Metrics) -> None:
        if self._callbacks.params["steps"] != batches_per_epoch:
            self._callbacks.set_params({**self._callbacks.params, "steps": batches_per_epoch})
        watch = self._watch if self._watches_batches else None
        if watch is not None:
            self._collect()
        self._batches = batches
        self._callbacks.on_train_batch_begin(batches - 1)
        self._callbacks.on_train_batch_end(batches - 1, dict(metrics))
        if watch is not None:
            found = watch.found()
            self._refuse_weights(found, "at a batch's begin or end")
            self._take(found)

    def _end_epoch(self, event: EpochEnded) -> None:
        """The last batch, if nobody has seen it, the validation, and the epoch's end, as in Keras.

        Where a callback stops the training inside an epoch, no batch follows.
        """
        logs = dict(event.metrics)
        held_out = {
            name.removeprefix(_VALIDATION): value
            for name, value in logs.items()
            if name.startswith(_VALIDATION)
        }
        if self.has_callbacks and event.batches > self._batches and not self.stop_wanted:
            trained = {n: v for n, v in logs.items() if not n.startswith(_VALIDATION)}
            self._show_batch(event.batches, event.batches_per_epoch, trained)
        if held_out:
            self._show_validation(held_out)
        self._logs = logs
        self._callbacks.on_epoch_end(event.epoch, dict(logs))

    def _show_validation(self, held_out: Metrics) -> None:
        watch = self._watch if self._watches_validation else None
        if watch is not None:
            self._collect()
        self._callbacks.on_test_begin()
        self._callbacks.on_test_batch_begin(0)
        self._callbacks.on_test_batch_end(0, dict(held_out))
        if watch is not None:
            found = watch.found()
            self._refuse_for_validation(found)
            self._take(found)
        self._callbacks.on_test_end(dict(held_out))

    def model_sent(self) -> None:
        """The workers were sent the model as it is: what callbacks write from now on counts."""
        self._written = self._last_written = VariableChanges()
        if self._watch is not None:
            self._watch.begin()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Within, the workers' weights are loaded into the model: no callback wrote them."""
        self._collect()
        yield
        self._last_written = VariableChanges()
        if self._watch is not None:
            self._watch.look()

    def take_changes(self) -> VariableChanges:
        """The values that callbacks wrote since the last call.

        Raises:
            ModelError: They wrote what the workers cannot take.
        """
        self._collect()
        written, self._written = self._written, VariableChanges()
        return written

    def write_again(self) -> None:
        """Sets what callbacks wrote since the weights were loaded, which were loaded again."""
        write_changes(self._model, self._last_written)
        if self._watch is not None:
            self._watch.look()

    def _collect(self) -> None:
        if self._watch is None:
            return
        found = self._watch.found()
        if not self._waits:
            self._refuse_weights(found, "while workers take turns or train models of their own")
        self._take(found)

    def _take(self, found: VariableChanges) -> None:
        if found:
            self._written = self._written.followed_by(found)
            self._last_written = self._last_written.followed_by(found)

    def _refuse_weights(self, found: VariableChanges, when: str) -> None:
        """The driver has the weights of an epoch's end: a callback would set them back to those."""
        if not found.offsets:
            return
        names = self._names(found.offsets)
        raise ModelError(
            f"a callback wrote weights of model {self._model.name!r} {when}",
            expected="weights to be written in on_epoch_end or on_epoch_begin, while all workers "
            "wait; elsewhere variables that are not trained, and the learning rate",
            received=f"other values of {names}",
            hint="the workers have gone on from the weights that the driver has; a constraint of "
            "the variable is held after each step",
        )

    def _refuse_for_validation(self, found: VariableChanges) -> None:
        """The workers have evaluated: what is written before validation would not be in it."""
        names = self._names(found.model)
        if names:
            raise ModelError(
                f"a callback wrote variables of model {self._model.name!r} for the validation",
                expected="variables to be written in on_epoch_begin or on_epoch_end",
                received=f"other values of {names}, written before on_test_end",
                hint="the workers have evaluated before callbacks hear of it: val_loss is of the "
                "values before. evaluate(...) after fit evaluates others",
            )

    def _names(self, numbers: Iterable[int]) -> str:
        metrics = {id(variable) for variable in self._model.metrics_variables}
        every = [self._model.variables[number] for number in sorted(numbers)]
        paths = [variable.path for variable in every if id(variable) not in metrics]
        return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")

    @property
    def stop_wanted(self) -> bool:
        """Whether a callback has set ``model.stop_training``."""
        return bool(self._model.stop_training)

    @property
    def learning_rate(self) -> float | None:
        """The optimizer's learning rate; None if it is a schedule, or it has several."""
        optimizer = innermost_optimizer(self._model)
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is None or isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
        if optimizers_within(optimizer):
            return None
        return float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    @property
    def history(self) -> Any:
        """Keras' ``History`` of this fit."""
        return self._model.history


_READ_LOGS = (
    keras.callbacks.Callback,
    keras.callbacks.History,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)
_VALIDATION_EVENTS = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end")
_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


def may_act(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback may write to the model, or wants the weights that its logs are of.

    Keras' own that only read logs, or stop, do neither; of others nobody knows.
    """
    if type(callback) is keras.callbacks.EarlyStopping:
        return bool(callback.restore_best_weights)
    return type(callback) not in _READ_LOGS


def keeping_callbacks() -> tuple[type, ...]:
    """The callbacks of Keras that write the model to files."""
    return keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore


def restores_best(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback gives the model its best weights back in the end."""
    is_early = isinstance(callback, keras.callbacks.EarlyStopping)
    return is_early and bool(callback.restore_best_weights)


def acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback has code of its own for batches, and may write to the model there."""
    return may_act(callback) and _has_own(callback, _BATCH_EVENTS)


def acts_on_validation(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback has code of its own for validation, and may write to the model there."""
    return may_act(callback) and _has_own(callback, _VALIDATION_EVENTS)


def _has_own(callback: keras.callbacks.Callback, methods: Iterable[str]) -> bool:
    plain = keras.callbacks.Callback
    return any(
        getattr(type(callback), name, None) is not getattr(plain, name) or name in vars(callback)
        for name in methods
    )


def require_directions(callbacks: Iterable[Any], model: keras.Model) -> None:
    """Refuses callbacks of Keras that would fail at the first epoch's end: on an unknown metric.

    Args:
        callbacks: The user's.
        model: Compiled; its metrics are built.

    Raises:
        ConfigError: The model has no metric that tells whether what a callback acts on shall grow.
    """
    for callback in callbacks:
        if not acts_on_metric(callback) or callback.monitor_op is not None:
            continue
        asked = copy.copy(callback)
        asked.set_model(model)
        try:
            asked._set_monitor_op()
        except ValueError as error:
            name, kind = callback.monitor, type(callback).__name__
            known = [one.name for m in model.metrics for one in getattr(m, "metrics", []) or [m]]
            raise ConfigError(
                f"{kind} acts on {name!r}, and nothing says whether that shall grow or fall",
                expected="a metric of the model, whose names are " + ", ".join(map(repr, known)),
                received=f"monitor={name!r}",
                hint=f"compile(metrics=[...]) with that metric, or {kind}({name!r}, mode='max')",
            ) from error


def acts_on_metric(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback of Keras compares the values of a metric."""
    best = getattr(callback, "save_best_only", True)
    return bool(best) and hasattr(callback, "_set_monitor_op")


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
