"""Writes of callbacks to the driver's model: found by comparing, and repeated on a worker."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.state.model_weights import averaged_variables, trained_variables
from sparkdl.learner.state.optimizer_state import innermost_optimizer, optimizers_within
from sparkdl.training.changes import VariableChanges

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
        optimizer = self._model.optimizer
        rate = getattr(innermost_optimizer(self._model), "_learning_rate", None)
        kept = {id(rate), *(id(v) for v in _seed_states(self._model))}

        def changed(variables: list[Any], old: list[bytes], new: list[bytes]) -> dict[int, Any]:
            return {
                i: np.array(variable.numpy())
                for i, variable in enumerate(variables)
                if old[i : i + 1] != new[i : i + 1] and id(variable) not in kept
            }

        model = changed(self._model.variables, before[0], self._marks[0])
        places = _places(self._model)
        offsets = {
            i: places[id(v)] for i, v in enumerate(self._model.variables)
            if i in model and id(v) in places
        }  # fmt: skip
        return VariableChanges(
            model, changed(optimizer.variables, before[1], self._marks[1]), offsets
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
        optimizer = self._model.optimizer
        return _digests(self._model.variables), _digests(optimizer.variables)


def write_changes(model: keras.Model, changes: VariableChanges) -> None:
    """Sets what callbacks wrote, in a Keras model that is the driver's or an equal one."""
    for pairs in changed_pairs(model, changes):
        for variable, value in pairs:
            variable.assign(value)


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
    found = []
    for variable in variables:
        value = np.ascontiguousarray(variable.numpy())
        found.append(hashlib.blake2b(value.reshape(-1).view(np.uint8).data).digest())
    return found


def _parts_of(model: keras.Model) -> dict[str, Any]:
    """The parts that must stay as they are while workers train; the keys name them in a message."""
    layers = [
        layer
        for layer in model._flatten_layers(include_self=True, recursive=True)
        if not isinstance(layer, keras.metrics.Metric)
    ]
    return {
        "the optimizer": id(model.optimizer),
        "settings of the optimizer": _settings_of(innermost_optimizer(model)),
        "the loss": id(model._compile_loss),
        "the layers": [id(layer) for layer in layers],
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


def _seed_states(model: keras.Model) -> list[Any]:
    return [
        generator.state
        for layer in model._flatten_layers(include_self=True, recursive=True)
        for generator in layer._seed_generators
    ]


def _places(model: keras.Model) -> dict[int, int]:
    places, offset = {}, 0
    for variable in [*trained_variables(model), *averaged_variables(model)]:
        places[id(variable)] = offset
        offset += int(np.prod(variable.shape, dtype=np.int64))
    return places
