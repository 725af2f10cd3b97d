"""A model's compile settings: whether the workers can make them again, and evaluate by them."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import keras
import numpy as np

from sparkdl.errors import ModelError
from sparkdl.learner.archives.archive import lenient_constructors, making_models
from sparkdl.learner.custom_objects import (
    compiled_objects,
    find_custom_objects,
    named_functions,
    own_compile_settings,
)
from sparkdl.learner.signature import has_own

_PLAIN = (bool, int, float, str, np.ndarray, np.generic, type(None))
_KINDS = {
    "loss": keras.losses.Loss,
    "metric": keras.metrics.Metric,
    "optimizer": keras.optimizers.Optimizer,
}


def require_remakable(model: keras.Model) -> None:
    """Refuses objects of the user's own among the compile settings that would not arrive whole.

    Keras sends such an object as its class and what ``get_config`` returns. Layers tell the
    arguments of their constructor without a ``get_config``; losses, metrics and optimizers do not.

    Raises:
        ModelError: A class does not tell an argument of its constructor; or Keras keeps variables
            in Flax's NNX.
    """
    if getattr(keras.config, "is_nnx_enabled", bool)():  # since Keras 3.11
        raise ModelError(
            "models that keep their variables in Flax's NNX cannot be trained by workers",
            expected="keras.config.is_nnx_enabled() False", received="True",
            hint="start Python without KERAS_NNX_ENABLED",
        )  # fmt: skip
    parts = compiled_objects(model)
    if not parts:
        return
    objects = find_custom_objects(model)
    with making_models, named_functions(model) as functions, lenient_constructors(objects):
        for part in parts:
            _require_remakable(model, part, {**objects, **functions})


def _require_remakable(model: keras.Model, part: object, objects: dict[str, Any]) -> None:
    given = {"custom_objects": objects, "safe_mode": False}
    try:
        saved = keras.saving.serialize_keras_object(part)
        untold = _untold(type(part), saved["config"])
        copy = keras.saving.deserialize_keras_object(saved, **given)
    except TypeError as error:
        needed = [name for name, has_default in untold.items() if not has_default]
        received = str(error).rpartition("Exception encountered: ")[2]
        raise _refusal(model, part, needed, received) from error
    except Exception:  # told where the model is saved, with what Keras says of it
        return
    lost = [name for name in untold if _differs(_value(part, name), _value(copy, name))]
    if lost:
        received = ", ".join(
            f"{n}={_value(part, n)!r}, which becomes {_value(copy, n)!r}" for n in lost
        )
        raise _refusal(model, part, lost, received)


def _untold(cls: type, config: dict[str, Any]) -> dict[str, bool]:
    return {
        name: parameter.default is not parameter.empty
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in config
    }


def _value(thing: object, argument: str) -> Any:
    return getattr(thing, "__dict__", {}).get(_attribute(thing, argument))


def _attribute(thing: object, argument: str) -> str:
    hidden = f"_{argument}"
    return hidden if hidden in getattr(thing, "__dict__", {}) else argument


def _differs(one: object, other: object) -> bool:
    plain = [all(isinstance(v, _PLAIN) for v in keras.tree.flatten(x)) for x in (one, other)]
    return plain[0] != plain[1] or (all(plain) and repr(one) != repr(other))


def _refusal(model: keras.Model, part: object, arguments: list[str], received: str) -> ModelError:
    name = type(part).__name__
    kind = next((kind for kind, cls in _KINDS.items() if isinstance(part, cls)), "object")
    line = ", ".join(f"{a!r}: self.{_attribute(part, a)}" for a in arguments) or "..."
    return ModelError(
        f"{kind} {name} of model {model.name!r} cannot be made again on the workers",
        expected="get_config with the arguments of its constructor, as for model.save",
        received=received,
        hint=f"in class {name}: def get_config(self): return {{**super().get_config(), {line}}}",
    )


def require_loadable(model: keras.Model) -> None:
    """Raises ModelError if what the model is compiled with would be lost with the workers' copy."""
    _, lost = own_compile_settings(model)
    if lost and not has_own(model, "compile_from_config"):
        raise ModelError(
            f"model {model.name!r} cannot be compiled again on the workers",
            expected="arguments of a compile of its own that the model keeps as attributes, or "
            "get_compile_config and compile_from_config",
            received=f"{type(model).__name__}.compile with {', '.join(lost)}",
            hint="get_compile_config(self) returns the arguments of compile as a dict (optimizers "
            "by keras.saving.serialize_keras_object), compile_from_config(self, config) calls "
            "self.compile with them",
        )
    require_remakable(model)


def require_evaluable(model: keras.Model) -> None:
    """Raises ModelError unless the model can be evaluated.

    A ``train_step`` of its own says nothing of what Keras' ``test_step`` computes: that needs a
    compiled loss, losses that layers add, or a ``compute_loss`` of the model's own.
    """
    if model._compile_loss is None and not has_own(model, "compute_loss", "test_step"):
        if adds_loss(type(model)) or layers_can_add_loss(model):
            return
        raise ModelError(
            f"model {model.name!r} cannot be evaluated: it has no loss",
            expected="a test_step of the model's own beside its train_step, or model.compile with "
            "a loss",
            received="Keras' test_step and no loss",
            hint="write test_step(self, data) like train_step, without the optimizer",
        )


def adds_loss(kind: type) -> bool:
    """Whether a method of the user's own class calls ``add_loss``."""
    methods = (
        method
        for base in kind.__mro__
        if not base.__module__.startswith("keras.")
        for method in vars(base).values()
    )
    return any(isinstance(m, FunctionType) and "add_loss" in m.__code__.co_names for m in methods)


def layers_can_add_loss(model: keras.Model) -> bool:
    """Whether a layer may add a loss when the model is called."""
    return bool(model.losses) or any(
        not type(layer).__module__.startswith("keras.")
        or isinstance(layer, keras.layers.ActivityRegularization)
        or getattr(layer, "activity_regularizer", None) is not None
        for layer in model._flatten_layers(include_self=False)
    )
