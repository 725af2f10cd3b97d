"""Forms of values by which equal ones are found: numbers, texts, arrays, containers, functions."""

from __future__ import annotations

import zlib
from types import FunctionType
from typing import Any

import numpy as np

UNKNOWN = ("unknown",)
"""Stands for a value that cannot be compared."""
_DEPTH = 4
_LONGEST = 10_000
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is numbers, texts, arrays and containers of these."""
    if isinstance(value, (*_PLAIN, np.ndarray)):
        return not (isinstance(value, np.ndarray) and value.dtype == object)
    if depth > _DEPTH or not isinstance(value, (list, tuple, set, frozenset, dict)):
        return False
    inner = [*value, *value.values()] if isinstance(value, dict) else list(value)
    return all(is_plain(item, depth + 1) for item in inner)


def plain_copy(value: Any) -> Any:
    """The value with Keras' own lists and dicts as those of Python."""
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in value.items()}
    for kind in (list, set, tuple):
        if isinstance(value, kind) and not hasattr(value, "_fields"):
            return kind(plain_copy(item) for item in value)
    return value


def form_of(value: Any, depth: int = 0) -> Any:
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
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _form_of_container(value, depth)
    if isinstance(value, FunctionType):
        return _form_of_function(value, depth)
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


def _kind_of(value: Any) -> str:
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
