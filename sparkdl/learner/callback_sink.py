"""Keras callbacks as a sink of a fit's events, on the driver; and what they write to its model:
found by comparing, and repeated on a worker."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.state.model_weights import exchanged_variables, model_layout
from sparkdl.learner.state.optimizer_state import innermost_optimizer, optimizers_within
from sparkdl.learner.state.seed_streams import seed_states
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
        self.has_callbacks = self.wants_progress = bool(callbacks)
        given = list(callbacks or [])
        self._callbacks = keras.callbacks.CallbackList(
            given, add_history=True, add_progbar=False, model=model,
            verbose=verbose, epochs=epochs, steps=None,
        )  # fmt: skip
        self._watch = WriteWatch(model) if any(map(may_act, given)) else None
        self._watches_batches = any(acts_on(BATCH_EVENTS, callback) for callback in given)
        self._watches_validation = any(acts_on(VALIDATION_EVENTS, each) for each in given)
        self._waits = waits
        self._written = VariableChanges()  # since the last take
        self._last_written = VariableChanges()  # since the weights were loaded last
        self._batches = 0  # of the present epoch that callbacks have seen
        self._logs: dict[str, Any] = {}

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
        validated = {n: v for n, v in logs.items() if n.startswith(_VALIDATION)}
        held_out = {name.removeprefix(_VALIDATION): v for name, v in validated.items()}
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
        for pairs in changed_pairs(self._model, self._last_written):
            for variable, value in pairs:
                variable.assign(value)
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
        raise ModelError(
            f"a callback wrote weights of model {self._model.name!r} {when}",
            expected="weights to be written in on_epoch_end or on_epoch_begin, while all workers "
            "wait; elsewhere variables that are not trained, and the learning rate",
            received=f"other values of {self._names(found.offsets)}",
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
VALIDATION_EVENTS = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end")
BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


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


def acts_on(events: Iterable[str], callback: keras.callbacks.Callback) -> bool:
    """Whether a callback has code of its own for events, and may write to the model there."""
    plain = keras.callbacks.Callback
    return may_act(callback) and any(
        getattr(type(callback), name, None) is not getattr(plain, name) or name in vars(callback)
        for name in events
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


_Marks = tuple[list[bytes], list[bytes]]
_Pairs = list[tuple[Any, npt.NDArray[Any]]]


class WriteWatch:
    """Finds which variables of a compiled model, and of its optimizer, have got other values.

    The optimizer's learning rate is left out, which travels by itself, and the states of seed
    generators, of which each worker has its own.

    Args:
        model: Compiled and built.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._parts: dict[str, Any] = {}
        self._marks: _Marks = ([], [])

    def begin(self) -> None:
        """Remembers the parts of the model, which are to stay, and looks."""
        self._parts = _parts_of(self._model)
        self.look()

    def look(self) -> None:
        """From now on writes count."""
        self._marks = self._marked()

    def found(self) -> VariableChanges:
        """The values that were written since the last look; looks again. Nothing before the begin.

        Raises:
            ModelError: A part of the model was replaced, added, removed or frozen.
        """
        self.check_parts()
        if not self._parts:
            return VariableChanges()
        before, self._marks = self._marks, self._marked()
        rate = getattr(innermost_optimizer(self._model), "_learning_rate", None)
        kept = {id(rate), *(id(v) for v in seed_states(self._model))}

        def changed(variables: list[Any], old: list[bytes], new: list[bytes]) -> dict[int, Any]:
            return {
                i: np.array(variable.numpy())
                for i, variable in enumerate(variables)
                if old[i : i + 1] != new[i : i + 1] and id(variable) not in kept
            }

        variables = self._model.variables  # a new list each time, over all layers
        model = changed(variables, before[0], self._marks[0])
        pairs = zip(exchanged_variables(self._model), model_layout(self._model).slots, strict=True)
        places = {id(variable): slot.offset for variable, slot in pairs}
        offsets = {i: places[id(variables[i])] for i in model if id(variables[i]) in places}
        return VariableChanges(
            model, changed(self._model.optimizer.variables, before[1], self._marks[1]), offsets
        )

    def check_parts(self) -> None:
        """Raises ModelError if a part of the model is not what it was at the begin."""
        now = _parts_of(self._model) if self._parts else {}
        for what, part in now.items():
            if part != self._parts[what]:
                raise ModelError(
                    f"a callback changed {what} of model {self._model.name!r} while workers train",
                    expected="callbacks that write values: variables of the model and of its "
                    "optimizer, the learning rate, model.stop_training",
                    received=f"a change of {what}, which the workers' copies of the model do not "
                    "take",
                    hint="end fit, change the model, compile it and call fit again: a second fit "
                    "goes on from the first",
                )

    def _marked(self) -> _Marks:
        return _digests(self._model.variables), _digests(self._model.optimizer.variables)


def changed_pairs(model: keras.Model, changes: VariableChanges) -> tuple[_Pairs, _Pairs]:
    """Each variable of a model, and of its optimizer, that has a new value, with the value.

    Raises:
        ModelError: The model has other variables than the driver's.
    """
    return (
        _paired(model.variables, changes.model),
        _paired(model.optimizer.variables, changes.optimizer),
    )


def _paired(variables: list[Any], values: Mapping[int, Any]) -> _Pairs:
    for number, value in values.items():
        shape = tuple(variables[number].shape) if number < len(variables) else None
        if shape != value.shape:
            raise ModelError(
                "a callback wrote a variable that the worker's model does not have",
                expected=f"variable {number} of shape {value.shape}",
                received=f"{len(variables)} variables, this one of shape {shape}",
                hint="does the model build other layers on the executors?",
            )
    return [(variables[number], value) for number, value in values.items()]


def _digests(variables: list[Any]) -> list[bytes]:
    """Digests of values: they tell values apart without a second model in memory."""
    values = (np.ascontiguousarray(variable.numpy()) for variable in variables)
    return [hashlib.blake2b(value.reshape(-1).view(np.uint8).data).digest() for value in values]


def _parts_of(model: keras.Model) -> dict[str, Any]:
    """The parts that must stay as they are while workers train; the keys name them in a message."""
    parts = model._flatten_layers(include_self=True, recursive=True)
    return {
        "the optimizer": id(model.optimizer),
        "settings of the optimizer": _settings_of(innermost_optimizer(model)),
        "the loss": id(model._compile_loss),
        "the layers": [id(p) for p in parts if not isinstance(p, keras.metrics.Metric)],
        "the variables": [id(v) for v in model.variables],
        "which variables are trainable": [id(v) for v in model.trainable_variables],
    }


def _settings_of(optimizer: keras.Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer that are no variables: ``clipnorm``, ``use_ema`` and so on."""
    return [
        {
            name: value
            for name, value in vars(one).items()
            if not name.startswith("_") and isinstance(value, (int, float, str, type(None)))
        }
        for one in (optimizer, *optimizers_within(optimizer))
    ]
