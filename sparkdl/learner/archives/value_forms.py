"""Forms of values by which equal ones are found: numbers, texts, arrays and tensors, containers,
functions, and objects of such attributes; and what layers keep, as their configuration."""

from __future__ import annotations

import contextlib
import inspect
import json
import zlib
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras.src.models.functional import Functional

from sparkdl.learner.archives.plain_config import TOLD
from sparkdl.learner.custom_objects import comes_with_keras, untold
from sparkdl.learner.framework import overlaid
from sparkdl.learner.state.model_weights import attributes_of_keras

UNKNOWN = ("unknown",)
"""Stands for a value that cannot be compared."""
_DEPTH = 4
_LONGEST = 10_000
_LIBRARIES = ("keras", "tensorflow", "torch", "jax", "jaxlib", "numpy", "builtins")
_VALUES = (bool, int, float, str)
_PLAIN = (*_VALUES, complex, bytes, np.generic, type(None))


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is numbers, texts, arrays and containers of these."""
    if isinstance(value, (*_PLAIN, np.ndarray)):
        return not (isinstance(value, np.ndarray) and value.dtype == object)
    if depth > _DEPTH or not isinstance(value, (list, tuple, set, frozenset, dict)):
        return False
    inner = [*value, *value.values()] if isinstance(value, dict) else list(value)
    return all(is_plain(item, depth + 1) for item in inner)


def is_plain_object(value: object, depth: int = 0) -> bool:
    """Whether it is an object of the user's own, of plain attributes, that Keras does not save."""
    return _is_own(value) and all(
        is_plain(item) or (depth < _DEPTH and is_plain_object(item, depth + 1))
        for item in vars(value).values()
    )


def _is_own(value: object) -> bool:
    known = type(value).__module__.partition(".")[0] in _LIBRARIES
    kinds = hasattr(value, "get_config") or isinstance(value, (type, FunctionType))
    return not known and not kinds and hasattr(value, "__dict__")


def numbers_of(value: object) -> npt.NDArray[Any] | None:
    """The values of a tensor or variable of a backend; None for what is none, or has none now."""
    if type(value).__module__.partition(".")[0] not in ("tensorflow", "torch", "jax", "jaxlib"):
        return None
    try:
        known = keras.ops.is_tensor(value) or hasattr(value, "assign")
        return np.array(keras.ops.convert_to_numpy(value)) if known else None
    except Exception:  # a symbol of a graph
        return None


def with_numbers(present: Any, value: npt.NDArray[Any]) -> Any:
    """A tensor or variable with other values: the same one, where it can be written to."""
    if hasattr(present, "assign"):
        present.assign(value)
        return present
    if hasattr(present, "copy_") and tuple(present.shape) == value.shape:
        present.data.copy_(keras.ops.convert_to_tensor(value))
        return present
    return keras.ops.convert_to_tensor(value, keras.backend.standardize_dtype(value.dtype))


def plain_copy(value: object) -> Any:
    """The value with Keras' own lists and dicts as those of Python."""
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in value.items()}
    for kind in (list, set, tuple):
        if isinstance(value, kind) and not hasattr(value, "_fields"):
            return kind(plain_copy(item) for item in value)
    return value


def form_of(value: object, depth: int = 0) -> Any:
    """A form of a value that equal values share; :data:`UNKNOWN` if it cannot be compared."""
    if isinstance(value, float) and value != value:
        return ("nan",)
    if isinstance(value, np.generic):
        return form_of(value.item(), depth)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return UNKNOWN
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return ("array", value.shape, str(value.dtype), zlib.crc32(content))
    if depth > _DEPTH:
        return UNKNOWN
    numbers = numbers_of(value)
    if numbers is not None:
        return form_of(numbers, depth)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _form_of_container(value, depth)
    if isinstance(value, FunctionType):
        return _form_of_function(value, depth)
    if _is_own(value):
        form = _form_of_container(vars(value), depth)
        return form if form is UNKNOWN else (type(value).__qualname__, form)
    return UNKNOWN


def _form_of_container(value: Any, depth: int) -> Any:
    if len(value) > _LONGEST:
        return UNKNOWN
    if isinstance(value, dict):
        items = [(str(key), form_of(item, depth + 1)) for key, item in value.items()]
        forms: list[Any] = [*sorted(items, key=lambda item: item[0])]
        unknown = any(form is UNKNOWN for _, form in items)
    else:
        forms = [form_of(item, depth + 1) for item in value]
        unknown = any(form is UNKNOWN for form in forms)
        if isinstance(value, (set, frozenset)):
            forms = sorted(forms, key=repr)
    return UNKNOWN if unknown else (_kind_of(value), tuple(forms))


def _kind_of(value: object) -> str:
    """Lists and tuples are one kind: a configuration, which is JSON, makes lists of both."""
    if isinstance(value, dict):
        return "dict"
    return "set" if isinstance(value, (set, frozenset)) else "list"


def _form_of_function(function: FunctionType, depth: int) -> Any:
    code = function.__code__
    inner = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    forms = [form_of(v, depth + 1) for v in (*inner, *(function.__defaults__ or ()))]
    return ("function", code.co_code, code.co_names, tuple(map(repr, forms)), _constants(code))


def _constants(code: Any) -> tuple[str, ...]:
    return tuple(repr(c) for c in code.co_consts if not hasattr(c, "co_code"))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def told_arguments(model: keras.Model, objects: dict[str, Any], wanted: bool) -> Iterator[None]:
    """Within, layers and models of a class without ``get_config`` have a configuration.

    It has the constructor's arguments, if the layer keeps all of them under their names
    (``self.encoder = encoder``); else it has the attributes, and no constructor runs.

    Args:
        objects: Gets what no configuration holds, by the names that stand for it.
        wanted: False for a file that Keras itself is to load, which it would not.
    """
    parts = model._flatten_layers(include_self=True, recursive=True) if wanted else ()
    with contextlib.ExitStack() as stack:
        for layer in [part for part in parts if _tells_nothing(part)]:
            stack.enter_context(overlaid(layer, get_config=partial(_told, layer, objects)))
        yield


def _tells_nothing(layer: keras.Layer) -> bool:
    """Whether Keras knows no arguments of its own class' constructor."""
    kind, given = type(layer), inspect.signature(type(layer)).parameters.values()
    own = given and not comes_with_keras(kind.__init__)
    if not (own and comes_with_keras(kind.from_config) and comes_with_keras(kind.get_config)):
        return False
    if isinstance(layer, (keras.Sequential, Functional)):
        return not any(a.kind is a.VAR_POSITIONAL or a.name in ("layers", "inputs") for a in given)
    default = getattr(kind.get_config, "_is_default", False) and not isinstance(layer, keras.Model)
    return not default or layer._auto_config is None


def _told(layer: keras.Layer, objects: dict[str, Any]) -> dict[str, Any]:
    kind = type(layer)
    graph = isinstance(layer, (keras.Sequential, Functional))
    config = {"name": layer.name} if graph else kind.get_config(layer)
    held = {**vars(layer), **vars(layer).get("_modules", {})}
    given = untold(kind, config)
    kept = {name: held[at] for name in given for at in (f"_{name}", name) if at in held}
    told = {
        name: value for name, value in kept.items()
        if isinstance(value, _VALUES) or not isinstance(given[name].default, _VALUES)
    }  # fmt: skip
    base = next(base for base in kind.__mro__ if comes_with_keras(base))
    bare = base in (keras.Layer, keras.Model, keras.Sequential) and len(told) < len(given)
    bare = bare and layer._auto_config is None  # else all have defaults
    if bare:
        keras_own = {"get_config", *attributes_of_keras()}
        told = {name: value for name, value in held.items() if name not in keras_own}
    config |= {name: _saved(v, objects) for name, v in told.items() if not _is_made_later(v)}
    if bare and base is keras.Sequential:
        config["layers"] = _saved(list(layer._layers), objects)
    if bare and not comes_with_keras(kind.build):  # it builds them, and may give them variables
        config = json.loads(json.dumps(config).replace('"build_config": {', '"unused": {'))
    return config | {TOLD: [*told] if bare else True}


def _is_made_later(value: object) -> bool:
    """Whether it is what ``build``, a call or ``fit`` makes."""
    return any(
        isinstance(part, (keras.Variable, keras.KerasTensor, keras.callbacks.Callback))
        or (keras.ops.is_tensor(part) and numbers_of(part) is None)
        for part in keras.tree.flatten(value)
    )


def _saved(value: object, objects: dict[str, Any]) -> Any:
    if value is None or isinstance(value, _VALUES):
        return value
    if any(hasattr(type(part), "get_config") for part in keras.tree.flatten(value)):
        return keras.saving.serialize_keras_object(value)
    names = (name for name, known in objects.items() if known is value)
    name = next(names, f"sparkdl_argument_{len(objects)}")
    objects[name] = plain_copy(value)  # Keras' own lists and dicts know the layer's variables
    return {"class_name": "function", "config": name, "registered_name": name}
