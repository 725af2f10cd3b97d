"""Forms of values by which equal ones are found: numbers, texts, arrays and tensors, containers,
functions, and objects of such attributes; and a model's configuration without what differs between
equal models, half of its key."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

UNKNOWN = ("unknown",)
"""Stands for a value that cannot be compared."""
_DEPTH = 4
_LONGEST = 10_000
_LIBRARIES = ("keras", "tensorflow", "torch", "jax", "jaxlib", "numpy", "builtins")
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


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


_REFERENCES = frozenset({"name", "keras_history", "input_layers", "output_layers"})
"""Keys of a saved configuration below which the name of a layer means the layer."""


def plain_config(content: bytes) -> bytes:
    """A model's ``config.json`` without what differs between equal models.

    Left out are the learning rate (state: callbacks change it) and the optimizer's name. Names
    that Keras gave by itself are numbered anew, in their order; names that the user gave stay. So
    do those of several inputs or several outputs, whose data go by them.
    """
    config = json.loads(content)
    _drop_learning_rate(config)
    _number_shared(config, {})
    names: dict[str, str] = {}
    _find_names(config, names)
    for kept in names_of_data(config):
        names.pop(kept, None)
    return json.dumps(_rename(config, names, False), sort_keys=True).encode()


def _drop_learning_rate(config: dict[str, Any]) -> None:
    try:
        settings = config["compile_config"]["optimizer"]["config"]
        while settings is not None:
            settings.pop("name", None)
            if isinstance(settings.get("learning_rate"), float):
                settings.pop("learning_rate")
            settings = (settings.get("inner_optimizer") or {}).get("config")
    except (KeyError, TypeError, AttributeError):
        pass


def _number_shared(value: object, numbers: dict[Any, int]) -> None:
    """Numbers objects that several layers share in their order: Keras writes their addresses."""
    if isinstance(value, list):
        for item in value:
            _number_shared(item, numbers)
    if isinstance(value, dict):
        if "shared_object_id" in value:
            shared = value["shared_object_id"]
            value["shared_object_id"] = numbers.setdefault(shared, len(numbers))
        for item in value.values():
            _number_shared(item, numbers)


def names_of_data(config: dict[str, Any]) -> set[str]:
    """The names that data go by, of a model with several inputs, several outputs or keys for them.

    Args:
        config: The content of a ``config.json``.
    """
    sides = [(config.get("config") or {}).get(side) for side in ("input_layers", "output_layers")]
    found = [(side, list(_names_at(side))) for side in sides]
    return {name for side, at in found if len(at) > 1 or isinstance(side, dict) for name in at}


def _names_at(ends: object) -> Iterator[str]:
    if isinstance(ends, list) and len(ends) == 3 and isinstance(ends[0], str):
        yield ends[0]
    elif isinstance(ends, (dict, list)):
        yield from ends if isinstance(ends, dict) else ()
        for end in ends.values() if isinstance(ends, dict) else ends:
            yield from _names_at(end)


def _find_names(value: object, names: dict[str, str]) -> None:
    """Collects the names that Keras made from a class: ``dense``, ``dense_1`` for ``Dense``."""
    if isinstance(value, list):
        for item in value:
            _find_names(item, names)
    if not isinstance(value, dict):
        return
    cls, settings = value.get("class_name"), value.get("config")
    if isinstance(cls, str) and isinstance(settings, dict):
        name, stem = settings.get("name", value.get("name")), _snake_case(cls)
        if isinstance(name, str) and re.fullmatch(rf"{re.escape(stem)}(_\d+)?", name):
            names.setdefault(name, f"{stem} number {len(names)}")
    for item in value.values():
        _find_names(item, names)


def _rename(value: object, names: dict[str, str], is_reference: bool) -> Any:
    if isinstance(value, str):
        return names.get(value, value) if is_reference else value
    if isinstance(value, list):
        return [_rename(item, names, is_reference) for item in value]
    if isinstance(value, dict):
        return {k: _rename(v, names, k in _REFERENCES) for k, v in value.items()}
    return value


def _snake_case(name: str) -> str:
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
