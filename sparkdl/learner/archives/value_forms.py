"""Forms of values by which equal ones are found: numbers, texts, arrays and tensors, containers,
functions, and objects of such attributes."""

from __future__ import annotations

import zlib
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
