"""The classes and functions of the user's in a model, by the names that its saved form uses."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any

import keras

_LIBRARIES = ("keras", "builtins", "tensorflow", "numpy")
_DEPTH = 6
_LONGEST = 1000
_FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find_custom_objects(model: keras.Model) -> dict[str, Any]:
    """Classes and module-level functions in the model that do not come with Keras, by name."""
    found: dict[str, Any] = {}

    def add(thing: Any) -> None:
        target = thing if callable(thing) and hasattr(thing, "__qualname__") else type(thing)
        if not comes_with_keras(target) and not _is_nameless(target):
            found[keras.saving.get_registered_name(target)] = target
            found.setdefault(target.__name__, target)

    for layer in model._flatten_layers(include_self=True, recursive=True):
        add(layer)
        for part in _parts(list(vars(layer).values())):
            function = isinstance(part, FunctionType) and "." not in part.__qualname__
            if function or _is_saved_object(part):
                add(part)  # not the layer's own methods, which Keras wraps
    for part in _parts(_compiled(model)):
        add(part)
    return found


def functions_in_configs(model: keras.Model) -> str:
    """A hint at the layers whose ``get_config`` has a function in it: it comes back as a dict."""
    for layer in model._flatten_layers(include_self=False):
        if type(layer).__module__.startswith("keras."):
            continue
        for name, value in layer.get_config().items():
            if inspect.isroutine(value):
                return (
                    f"get_config of layer {layer.name!r} has a function as {name!r}, which its "
                    "constructor gets as a dict: from_config with config["
                    f"{name!r}] = keras.saving.deserialize_keras_object(config[{name!r}]), or a "
                    "keras.layers.Lambda"
                )
    return ""


@contextlib.contextmanager
def named_functions(model: keras.Model) -> Iterator[dict[str, Any]]:
    """Within, lambdas and local functions in the model have names under which Keras saves them, and
    so have functions and classes that share a name.

    A ``functools.partial`` or an object that is called, which Keras cannot save, is a function that
    calls it meanwhile. Keras saves the code of a lambda without its globals: that of ``lambda x:
    ops.tanh(x)`` does not know ``ops`` when it is loaded. What is no lambda it saves by its name
    and expects it among the custom objects when it loads; functions or classes of equal names (of
    two modules, or of a cell that was run twice) would be mixed up. So each gets a name of its own
    while the model is saved, and travels by value under that name.

    Yields:
        New name -> function or class. Not all of them need be part of what Keras saves.
    """
    layers = model._flatten_layers(include_self=True, recursive=True)
    of_keras = [vars(layer) for layer in layers if comes_with_keras(type(layer))]
    if (compiled := getattr(model, "_compile_config", None)) is not None:
        of_keras.append(compiled.config)
    given = [(values, name, value) for values in of_keras for name, value in values.items()]
    names: dict[Any, str] = {}
    try:
        for values, name, value in given:
            values[name] = _as_function(value)
        held = _parts([*(list(vars(layer).values()) for layer in layers), _compiled(model)])
        parts = [p for p in (*layers, *held) if isinstance(p, FunctionType) or _is_saved_object(p)]
        targets = (p if isinstance(p, FunctionType) else type(p) for p in parts)
        found = {id(target): target for target in targets if not comes_with_keras(target)}
        called = Counter(map(keras.saving.get_registered_name, found.values()))
        names |= {
            target: target.__name__ for target in found.values()
            if _is_nameless(target) or called[keras.saving.get_registered_name(target)] > 1
        }  # fmt: skip
        for number, function in enumerate(names):
            function.__name__ = f"sparkdl_function_{number}"
        yield {keras.saving.get_registered_name(function): function for function in names}
    finally:
        for function, name in names.items():
            function.__name__ = name
        for values, name, value in given:
            values[name] = value


def _as_function(value: Any) -> Any:
    """``value``, or a function in its place where it is called and Keras has no way to save it."""
    if type(value) in (list, dict) and len(value) <= _LONGEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: _as_function(item) for key, item in items}
        return made if isinstance(value, dict) else list(made.values())
    saved = inspect.isroutine(value) or inspect.isclass(value) or hasattr(value, "get_config")
    if not callable(value) or saved or comes_with_keras(type(value)):
        return value
    return lambda *arguments, **options: value(*arguments, **options)


def untold(cls: type, config: Collection[str]) -> dict[str, inspect.Parameter]:
    """The arguments of a class's constructor that a saved configuration has not."""
    return {
        name: argument for name, argument in inspect.signature(cls).parameters.items()
        if name not in config and argument.kind not in _FREE
    }  # fmt: skip


def compiled_objects(model: keras.Model) -> list[Any]:
    """The losses, metrics, optimizers and their like of the user's own that it is compiled with."""
    found = _parts(_compiled(model))
    return [part for part in found if not isinstance(part, type) and _is_saved_object(part)]


def comes_with_keras(target: object) -> bool:
    """Whether a class, a function or the class of an object is not the user's own."""
    module = getattr(target, "__module__", "") or ""
    return module.split(".")[0] in _LIBRARIES


def _is_nameless(target: object) -> bool:
    return isinstance(target, FunctionType) and "<" in target.__qualname__


def compile_settings(model: keras.Model) -> dict[str, Any]:
    """The arguments that the model was compiled with, as far as they are known: those of Keras, and
    of a ``compile`` of its own those that the model keeps as attributes of the same name.

    Compiled again without a loss or metrics a model keeps those of before.
    """
    compiled = getattr(model, "_compile_config", None)
    if compiled is None:
        return {}
    found = {**compiled.config, **own_compile_settings(model)[0]}
    kinds = (model._compile_loss, ("loss", "loss_weights")), (
        model._compile_metrics, ("metrics", "weighted_metrics"),
    )  # fmt: skip
    for kept, names in kinds:
        if kept is not None and found.get(names[0]) is None and found.get(names[-1]) is None:
            found |= {name: getattr(kept, f"_user_{name}") for name in names}
    if found.get("loss") is None:  # keras.distillation.Distiller tells Keras of none
        found["loss"] = getattr(model, "_student_loss_for_serialization", None)
    return found


def own_compile_settings(model: keras.Model) -> tuple[dict[str, Any], list[str]]:
    """The arguments of a ``compile`` of a model's own that are none of ``keras.Model.compile``.

    Returns:
        Those that the model keeps as attributes, with their values (``sampler`` of a causal
        language model of KerasHub), and the names of all others. Optimizers are among the others:
        a model has one.
    """
    known = set(inspect.signature(keras.Model.compile).parameters)
    found: dict[str, Any] = {}
    others: list[str] = []
    for kind in type(model).__mro__:
        method = None if comes_with_keras(kind) else vars(kind).get("compile")
        for name, one in inspect.signature(method).parameters.items() if method else ():
            if name in known or one.kind in _FREE:
                continue
            known.add(name)
            held = next((n for n in (name, f"_{name}") if n in vars(model)), None)
            if held is None or isinstance(vars(model)[held], keras.optimizers.Optimizer):
                others.append(name)
            else:
                found[name] = vars(model)[held]
    return found, others


def _compiled(model: keras.Model) -> list[Any]:
    return [getattr(model, "optimizer", None), *compile_settings(model).values()]


def _parts(thing: Any, depth: int = 0) -> Iterator[Any]:
    """Callables and Keras objects within lists, dicts, Keras' wrappers of functions, and objects
    of the user's own."""
    if thing is None or isinstance(thing, (str, int, float, bool)) or depth > _DEPTH:
        return
    if isinstance(thing, (dict, list, tuple)):
        if len(thing) > _LONGEST:  # a vocabulary, not functions
            return
        for value in list(thing.values()) if isinstance(thing, dict) else thing:
            yield from _parts(value, depth + 1)
    elif callable(thing) or hasattr(thing, "get_config"):
        yield thing
        if type(thing).__name__ == "LossScaleOptimizer":
            yield from _parts(thing.inner_optimizer, depth + 1)
        for name in ("_learning_rate", "fn", "_fn"):  # of an optimizer, a loss and a metric
            yield from _parts(getattr(thing, name, None), depth + 1)
        if _is_saved_object(thing) and not isinstance(thing, keras.Layer):
            for part in _parts(list(getattr(thing, "__dict__", {}).values()), depth + 1):
                if isinstance(part, FunctionType) or _is_saved_object(part):
                    yield part  # what else it keeps is nothing that Keras saves


def _is_saved_object(thing: object) -> bool:
    kind = type(thing)
    return hasattr(kind, "get_config") and not comes_with_keras(kind)
