"""Keras' optimizer variables as bytes, and those of one kind as a flat vector.

A *slot* is an attribute of an optimizer with one variable for each trained variable of the model,
such as Adam's ``_momentums``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ModelError
from sparkdl.files.model_file import pack_arrays, unpack_arrays
from sparkdl.learner.state.carried_state import plain
from sparkdl.learner.state.model_weights import trained_variables
from sparkdl.optimizers.flat import FlatOptimizer
from sparkdl.weights import FloatArray


def load_optimizer_state(model: keras.Model, state: bytes, *, keep_rate: bool = False) -> None:
    """Sets a model's optimizer variables from what a learner's ``optimizer_state`` returned.

    Args:
        model: Compiled.
        state: State of an equal model's optimizer.
        keep_rate: The model's learning rate stays as it is.

    Raises:
        ModelError: The state is that of another optimizer.
    """
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    values = list(unpack_arrays(state, "the optimizer state").values())
    if len(values) != len(optimizer.variables):
        raise ModelError(
            "the optimizer state does not fit the optimizer",
            expected=f"{len(optimizer.variables)} variables", received=f"{len(values)}",
            hint="was the model compiled with another optimizer since the state was saved?",
        )  # fmt: skip
    kept = getattr(innermost_optimizer(model), "_learning_rate", None) if keep_rate else None
    for variable, value in zip(optimizer.variables, values, strict=True):
        if variable is not kept:
            variable.assign(value)


def forget_lost_variables(model: keras.Model) -> None:
    """Takes from the optimizer what it keeps for variables that ``quantize`` took from the model.

    Keras' steps never look at it again. What is left is what an optimizer has that is made for the
    present variables, as a worker makes it.
    """
    layers = model._flatten_layers(include_self=True, recursive=True)
    if not any(getattr(layer, "quantization_mode", None) for layer in layers):
        return
    present = {id(v) for v in model.variables}
    optimizer = model.optimizer
    while optimizer is not None:
        known = optimizer._trainable_variables
        kept = [i for i, v in enumerate(known) if id(v) in present]
        held = vars(optimizer)
        for name, slots in list(held.items()) if len(kept) < len(known) else ():
            if isinstance(slots, list) and len(slots) == len(known) and name != "_variables":
                held[name] = [slots[i] for i in kept]
                lost = {id(v) for v in slots} - {id(v) for v in held[name]}
                for number in reversed(range(len(optimizer._variables))):
                    if id(optimizer._variables[number]) in lost:
                        del optimizer._variables[number]
        numbers = {optimizer._var_key(known[i]): number for number, i in enumerate(kept)}
        held["_trainable_variables_indices"] = numbers
        optimizer = getattr(optimizer, "inner_optimizer", None)


def build_if_empty(model: keras.Model) -> None:
    """Builds an optimizer that Keras built with no variables, as it does from an ``.h5`` file."""
    optimizer = innermost_optimizer(model)
    if optimizer.built and not (optimizer._trainable_variables or optimizers_within(optimizer)):
        optimizer.built = False
        optimizer.build(model.trainable_variables)


def unknown_variables(model: keras.Model) -> list[Any]:
    """Variables that train and that the optimizer, which is built, was not built with."""
    optimizer = innermost_optimizer(model)
    if not optimizer.built or optimizers_within(optimizer):
        return []
    known = {id(v) for v in optimizer._trainable_variables}
    return [v for v in model.trainable_variables if id(v) not in known]


def learning_rate_of(model: keras.Model) -> float | None:
    """A compiled model's learning rate; None where a schedule says it."""
    variable: Any = getattr(innermost_optimizer(model), "_learning_rate", None)
    return float(variable.numpy()) if hasattr(variable, "assign") else None


@contextlib.contextmanager
def learning_rate_set(model: keras.Model, rate: float | None) -> Iterator[None]:
    """Within, the model's learning rate is ``rate``; None, or a schedule, leaves it as it is."""
    variable: Any = getattr(innermost_optimizer(model), "_learning_rate", None)
    if rate is None or not hasattr(variable, "assign"):
        yield
        return
    present = np.asarray(variable.numpy())
    variable.assign(rate)
    try:
        yield
    finally:
        variable.assign(present)


def innermost_optimizer(model: keras.Model) -> Any:
    """The optimizer that takes the steps, inside a LossScaleOptimizer or another wrapper."""
    optimizer = model.optimizer
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def batch_counter(optimizer: keras.Optimizer) -> Any:
    """The variable by which schedules go: batches, also where gradients of several make a step."""
    return optimizer._iterations


def optimizers_within(optimizer: keras.Optimizer) -> list[Any]:
    """The optimizers of a ``MultiOptimizer``, which has no learning rate of its own; else none."""
    kind = vars(keras.optimizers).get("MultiOptimizer")  # since Keras 3.12
    return list(optimizer.optimizers) if kind and isinstance(optimizer, kind) else []


def take_averages(model: keras.Model) -> None:
    """With ``use_ema`` the averages become the weights, as at the end of Keras' ``fit``."""
    model.optimizer.finalize_variable_values(model.trainable_variables)
    averages = {id(variable.value) for variable in model.optimizer.variables}
    for variable in model.trainable_variables:
        if id(variable.value) in averages:
            # One array for two variables: JAX frees it with the first when the model predicts.
            variable.assign(keras.ops.copy(variable.value))


class ModelOptimizer:
    """A model's optimizer in training; see :class:`sparkdl.training.learning.LearnerOptimizer`.

    Args:
        model: Compiled.
        trained: Its trained variables, in the order of the layout.
        present: Within it the optimizer's variables have their present values, and keep what they
            are given.
    """

    def __init__(
        self,
        model: keras.Model,
        trained: list[Any],
        present: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._model, self._trained, self._present = model, trained, present

    @property
    def has_schedule(self) -> bool:
        rate = getattr(innermost_optimizer(self._model), "_learning_rate", None)
        return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    @property
    def learning_rate(self) -> float:
        optimizer = innermost_optimizer(self._model)
        optimizer = next(iter(optimizers_within(optimizer)), optimizer)  # of several the first
        with self._present():
            return float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    def set_learning_rate(self, value: float) -> None:
        if self.has_schedule:
            raise ConfigError(
                "cannot set the learning rate of a running fit",
                expected="an optimizer with a plain learning rate",
                received="a LearningRateSchedule",
                hint="use either the schedule or a callback that sets the rate, not both",
            )
        with self._present():
            innermost_optimizer(self._model).learning_rate = value

    @property
    def step(self) -> int:
        with self._present():
            return int(keras.ops.convert_to_numpy(batch_counter(innermost_optimizer(self._model))))

    def set_step(self, step: int) -> None:
        if self.has_schedule:
            self.assign([(batch_counter(innermost_optimizer(self._model)), step)])

    @property
    def scales_loss(self) -> bool:
        return innermost_optimizer(self._model) is not self._model.optimizer

    @property
    def loss_scale(self) -> float | None:
        with self._present():
            scale = self._model.optimizer.dynamic_scale if self.scales_loss else None
            return None if scale is None else float(keras.ops.convert_to_numpy(scale))

    def end_scaled_step(self, finite: bool) -> float:
        optimizer, taken = self._model.optimizer, batch_counter(innermost_optimizer(self._model))
        counter, scale = optimizer.step_counter, optimizer.dynamic_scale
        values = {id(v): a for v, a in zip(optimizer.variables, self._arrays(), strict=True)}
        steps, scaled = int(values[id(counter)]) + 1, values[id(scale)]
        pairs = [(taken, values[id(taken)] + 1)] if finite else []
        if not finite:
            pairs += [(counter, np.array(0)), (scale, scaled * np.float32(0.5))]
        elif steps == optimizer.dynamic_growth_steps:
            pairs += [(counter, np.array(0)), (scale, scaled * np.float32(2))]
        else:
            pairs.append((counter, np.array(steps)))
        self.assign(pairs)
        return float(scaled)

    def state(self) -> bytes:
        arrays = enumerate(self._arrays())
        return pack_arrays({f"arr_{number}": plain(array) for number, array in arrays})

    def load_state(self, state: bytes) -> None:
        with self._present():
            load_optimizer_state(self._model, state)

    def slots(self, names: list[str]) -> dict[str, FloatArray] | None:
        arrays, found = self._arrays(), {}
        for name in names:
            places = self._places(name)
            if places is None:
                return None
            found[name] = np.concatenate([arrays[i].ravel() for i in places]).astype(np.float32)
        return found

    def load_slots(self, slots: dict[str, FloatArray], step: int) -> None:
        arrays, variables = self._arrays(), self._model.optimizer.variables
        for name, flat in slots.items():
            places = self._places(name) or []
            ends = np.cumsum([arrays[i].size for i in places])[:-1]
            for i, part in zip(places, np.split(flat, ends.tolist()), strict=True):
                arrays[i] = part.reshape(arrays[i].shape)
        steps = batch_counter(innermost_optimizer(self._model))
        counter = next(i for i, v in enumerate(variables) if v is steps)
        arrays[counter] = np.array(step, arrays[counter].dtype)
        self.assign(zip(variables, arrays, strict=True))

    def _places(self, name: str) -> list[int] | None:
        """The place of a slot's variable among the optimizer's, for each trained variable."""
        numbers = {id(variable): i for i, variable in enumerate(self._model.optimizer.variables)}
        inner = innermost_optimizer(self._model)
        slots = getattr(inner, name, None) or []
        if len(slots) != len(self._trained) or any(id(v) not in numbers for v in slots):
            return None
        return [numbers[id(slots[inner._get_variable_index(v)])] for v in self._trained]

    def assign(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Gives variables of the optimizer new values."""
        with self._present():
            for variable, value in pairs:
                variable.assign(value)

    def _arrays(self) -> list[npt.NDArray[Any]]:
        with self._present():
            return [np.asarray(v.numpy()) for v in self._model.optimizer.variables]


class DriverSlots:
    """The slots of a model's optimizer, whose steps the workers of a run take in slices.

    A worker holds the state of its slice alone. So the model that is sent to it has an optimizer
    without slots, and the slots travel as the state of the rule: whole to the driver, where the
    model's own optimizer gets them.

    Args:
        model: Compiled; of the optimizer's class that ``flat`` is the counterpart of.
        flat: The optimizer that takes the steps.
        slots: See :meth:`FlatOptimizer.keras_slots`; those of ``flat``, and of what is done around
            its steps.
    """

    def __init__(
        self, model: keras.Model, flat: FlatOptimizer, slots: Mapping[str, tuple[str, float]]
    ) -> None:
        self._model, self._flat, self._names = model, flat, slots
        self._trained = trained_variables(model)
        self._optimizer = ModelOptimizer(model, self._trained)

    @classmethod
    def of(
        cls, model: keras.Model, flat: FlatOptimizer | None, slots: Mapping[str, tuple[str, float]]
    ) -> DriverSlots | None:
        """Those of ``model``; None where its optimizer keeps nothing of what ``flat`` keeps."""
        if flat is None or not slots:
            return None
        names = {flat.keras_class, flat.keras_class.removesuffix("W")}  # Adam may decay weights
        inner = innermost_optimizer(model)
        return cls(model, flat, slots) if type(inner).__name__ in names else None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Within, the model has an optimizer with the learning rate and the steps, without slots.

        If the loss is scaled, that optimizer scales it as the model's own does; scale and
        counter keep what they become within. Two threads must not use the model meanwhile.
        """
        own, inner = self._model.optimizer, innermost_optimizer(self._model)
        rate = inner._learning_rate
        rate = rate if self._optimizer.has_schedule else float(rate.numpy())
        step = keras.optimizers.SGD(rate, name=inner.name)
        plain = step
        if own is not inner:
            plain = keras.optimizers.LossScaleOptimizer(
                step, own.initial_scale, own.dynamic_growth_steps, name=own.name
            )
            if not own.built:
                own.build(self._model.trainable_variables)
        plain.build(self._model.trainable_variables)
        step.iterations.assign(int(inner.iterations.numpy()))
        _copy_scale(own, plain)
        self._model.optimizer = plain
        try:
            yield
        finally:
            self._model.optimizer = own
            _copy_scale(plain, own)

    def to_bytes(self) -> bytes:
        """The state of the rule that the slots are; empty before the first step."""
        steps = self._optimizer.step if self._model.optimizer.built else 0
        slots = self._optimizer.slots([slot for slot, _ in self._names.values()]) if steps else None
        if slots is None:
            return b""
        state = {n: slots[slot] / np.float32(factor) for n, (slot, factor) in self._names.items()}
        return pack_arrays({**state, "steps": steps})

    def take_run(self, rule: bytes, optimizer: bytes) -> None:
        """Gives the model's optimizer what a run has kept.

        Args:
            optimizer: The optimizer without slots.
        """
        with self.left_out():
            load_optimizer_state(self._model, optimizer)
            steps = self._optimizer.step
        self.take(rule, steps)

    def take(self, state: bytes, steps: int) -> None:
        """Gives the model's optimizer the state of the rule.

        Args:
            state: What the workers' rule kept; empty: that before the first step.
            steps: The optimizer's.
        """
        if not self._model.optimizer.built:
            self._model.optimizer.build(self._trained)
        if state:
            found = unpack_arrays(state, "the state that a rule kept")
        else:
            nothing = np.zeros(sum(int(np.prod(v.shape)) for v in self._trained), np.float32)
            found = dict.fromkeys(self._names, nothing) | self._flat.init(nothing)
        slots = {s: found[name] * np.float32(f) for name, (s, f) in self._names.items()}
        self._optimizer.load_slots(slots, steps)


def _copy_scale(source: Any, target: Any) -> None:
    if isinstance(source, keras.optimizers.LossScaleOptimizer):
        target.dynamic_scale.assign(source.dynamic_scale.numpy())
        target.step_counter.assign(source.step_counter.numpy())


def slots_of(optimizer: keras.Optimizer | None) -> int:
    """How many numbers an optimizer keeps for each trained weight; the optimizer stays as it is.

    Args:
        optimizer: Optimizer of Keras; None for none.
    """
    if optimizer is None:
        return 0
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    twin = type(inner).from_config(inner.get_config())
    twin.build([keras.Variable(np.zeros((3, 5), np.float32))])
    return sum(tuple(v.shape) == (3, 5) for v in twin.variables)
