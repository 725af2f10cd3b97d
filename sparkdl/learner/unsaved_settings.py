"""Settings of a model that Keras keeps neither in its configuration nor among its weights.

The driver notes all of them; a worker gives them to the model that it has loaded. See the table in
docs/keras.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import keras
from keras.src.backend.common.remat import RematMode

from sparkdl.learner.optimizer_state import innermost_optimizer
from sparkdl.learner.value_forms import form_of, plain_copy

T = TypeVar("T")
Attributes = dict[int, dict[str, Any]]
"""Number of a part of the model -> attribute -> value."""


@dataclass(frozen=True)
class GlobalSettings:
    """Settings of Keras that a process has, not a model."""

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: Any
    flash_attention: bool | None
    wide_numbers: bool

    @classmethod
    def now(cls) -> GlobalSettings:
        """Those of this thread and process."""
        return cls(
            keras.config.floatx(),
            keras.config.epsilon(),
            keras.config.image_data_format(),
            keras.dtype_policies.serialize(keras.config.dtype_policy()),
            _flash_attention(),
            _wide_numbers(),
        )

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Within, this thread and process have these settings."""
        before, state = GlobalSettings.now(), keras.src.backend.common.global_state
        policy = state.get_global_attribute("dtype_policy")
        self._apply()
        try:
            yield
        finally:
            before._apply()
            state.set_global_attribute("dtype_policy", policy)

    def within(self, function: Callable[[], T]) -> T:
        """What ``function`` returns with these settings."""
        with self.set():
            return function()

    def _apply(self) -> None:
        keras.config.set_floatx(self.floatx)
        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        if keras.dtype_policies.serialize(keras.config.dtype_policy()) != self.dtype_policy:
            keras.config.set_dtype_policy(keras.dtype_policies.get(self.dtype_policy))
        if self.flash_attention is not _flash_attention():
            keras.src.backend.common.global_state.set_global_attribute(
                "flash_attention", self.flash_attention
            )
        if self.wide_numbers is not _wide_numbers():
            import jax

            jax.config.update("jax_enable_x64", self.wide_numbers)


@dataclass(frozen=True)
class UnsavedSettings:
    """What a loaded model is given, so that it is as the one that was saved.

    Args:
        globals: Of Keras.
        policies: The dtype policy of each layer, in the order of ``_flatten_layers``.
        remat: What each layer recomputes in the backward pass; None for nothing.
        trainable: Of each variable.
        regularizers: Number of a variable -> its regularizer, as Keras serializes it.
        constraints: Number of a variable -> its constraint.
        scales_loss: Whether the optimizer is in a ``LossScaleOptimizer``.
        stepped: The numbers of the variables that the optimizer knows.
        decays: Whether weight decay applies to each of them.
        attributes: What else differs from a model that is made from the configuration.
    """

    globals: GlobalSettings
    policies: list[Any]
    remat: list[tuple[Any, ...] | None]
    trainable: list[bool]
    regularizers: dict[int, Any]
    constraints: dict[int, Any]
    scales_loss: bool
    stepped: list[int] | None
    decays: list[bool]
    attributes: Attributes = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> UnsavedSettings:
        """The settings of a built model."""
        variables, optimizer = model.variables, getattr(model, "optimizer", None)
        stepped, decays = _stepped(variables, optimizer)
        return cls(
            GlobalSettings.now(),
            [keras.dtype_policies.serialize(p) if p else None for p in _policies(model)],
            [_remat(layer) for layer in parts_of(model)],
            [bool(v.trainable) for v in variables],
            {
                i: keras.regularizers.serialize(v.regularizer)
                for i, v in enumerate(variables) if getattr(v, "regularizer", None) is not None
            },
            {
                i: keras.constraints.serialize(v.constraint)
                for i, v in enumerate(variables) if getattr(v, "constraint", None) is not None
            },
            optimizer is not None and innermost_optimizer(model) is not optimizer,
            stepped,
            decays,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """A text that equal settings share; not those with large attributes."""
        apart = replace(self, attributes={})
        return f"{apart} {form_of(self.attributes)}"

    def apply(self, model: Any, custom_objects: dict[str, Any]) -> None:
        """Gives a model that was just loaded these settings."""
        for layer, policy, remat in zip(parts_of(model), self.policies, self.remat, strict=True):
            if policy is not None and keras.dtype_policies.serialize(layer.dtype_policy) != policy:
                layer.dtype_policy = keras.dtype_policies.get(policy)
            if remat != _remat(layer):
                layer._remat_mode = None if remat is None else RematMode(*remat)
        with keras.saving.custom_object_scope(custom_objects):
            for number, variable in enumerate(model.variables):
                if variable.trainable != self.trainable[number]:
                    variable.trainable = self.trainable[number]
                _set_part(
                    variable, "regularizer", self.regularizers.get(number), keras.regularizers
                )
                _set_part(variable, "constraint", self.constraints.get(number), keras.constraints)
        if getattr(model, "optimizer", None) is not None and self.stepped is not None:
            self._apply_to_optimizer(model, self.stepped)

    def _apply_to_optimizer(self, model: Any, stepped: list[int]) -> None:
        optimizer = model.optimizer
        if not self.scales_loss and innermost_optimizer(model) is not optimizer:
            optimizer = innermost_optimizer(model)  # compile wraps it by the policy
        known = [model.variables[number] for number in stepped]
        built = list(optimizer._trainable_variables) if optimizer.built else []
        if [id(v) for v in built] != [id(v) for v in known]:
            optimizer = type(optimizer).from_config(optimizer.get_config())
            optimizer.build(known)
        if optimizer is not model.optimizer:
            model.optimizer = optimizer
        if not all(self.decays):
            inner = innermost_optimizer(model)
            # What exclude_from_weight_decay sets; it refuses an optimizer that is built.
            inner._exclude_from_weight_decay = {
                inner._var_key(v)
                for v, decays in zip(known, self.decays, strict=True)
                if not decays
            }
            inner._exclude_from_weight_decay_pattern = None
            inner._exclude_from_weight_decay_cache = {}


def parts_of(model: Any) -> list[Any]:
    """The model and its layers, in an order that an equal model has, too."""
    layers = model._flatten_layers(include_self=True, recursive=True)
    return [layer for layer in layers if not isinstance(layer, keras.metrics.Metric)]


def _policies(model: Any) -> Iterator[Any]:
    return (layer.dtype_policy for layer in parts_of(model))


def _remat(layer: Any) -> tuple[Any, ...] | None:
    mode = getattr(layer, "_remat_mode", None)  # older versions of Keras have none
    return None if mode is None else tuple(plain_copy(part) for part in mode)


def _stepped(variables: list[Any], optimizer: Any) -> tuple[list[int] | None, list[bool]]:
    """The numbers of the variables that an optimizer knows, and whether it decays each."""
    if optimizer is None or not optimizer.built:
        return None, []
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    known = optimizer._trainable_variables
    if any(id(variable) not in numbers for variable in known):
        return None, []
    inner = optimizer
    while hasattr(inner, "inner_optimizer"):
        inner = inner.inner_optimizer
    return [numbers[id(v)] for v in known], [bool(inner._use_weight_decay(v)) for v in known]


def _set_part(variable: Any, name: str, saved: Any, module: Any) -> None:
    """Gives a variable its regularizer or constraint, unless it has an equal one."""
    present = getattr(variable, name, None)
    if saved != (None if present is None else module.serialize(present)):
        setattr(variable, name, None if saved is None else module.deserialize(saved))


def _flash_attention() -> bool | None:
    state = keras.src.backend.common.global_state
    found: bool | None = state.get_global_attribute("flash_attention")
    return found


def _wide_numbers() -> bool:
    """Whether JAX has numbers of 64 bits."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return bool(jax.config.jax_enable_x64)
