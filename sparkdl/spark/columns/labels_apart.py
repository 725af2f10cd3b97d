"""Keras' own call ``fit(x, y)``: features and labels as two arguments become the one of sparkdl."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from sparkdl.call_arguments import shows_signature
from sparkdl.errors import ConfigError
from sparkdl.values import shown

P = ParamSpec("P")
R = TypeVar("R")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def takes_labels_apart(method: Callable[P, R]) -> Callable[P, R]:
    """A method of data that also takes arrays ``x, y``, and by name ``sample_weight``, as Keras'.

    Raises:
        ConfigError: From calls of the method: further arguments after ``x, y`` without names, whose
            order is another one in Keras.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        joined, options = join_labels(method.__name__, args[1:], kwargs)
        together: Callable[..., R] = method
        return together(args[0], *joined, **options)

    return shows_signature(call, method)


def join_labels(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments with arrays ``x, y`` (and ``sample_weight``) in one tuple; others as they are.

    Args:
        method: What is called.
        args: Its arguments without names.
        kwargs: Its arguments by name.

    Raises:
        ConfigError: See :func:`takes_labels_apart`; or ``x`` is no array.
    """
    given, options = list(args), dict(kwargs)
    for place, name in enumerate(("x", "y")):
        if len(given) == place and are_arrays(options.get(name)):
            given.append(options.pop(name))
    if not given and "x" in options:
        raise ConfigError(
            f"{method} takes data that are no arrays without a name",
            expected=f"{method}(df, features='column', label='column'), or {method}(x=x, y=y) with "
            "arrays",
            received=f"x={shown(options['x'])}",
        )
    if len(given) < 2 or not (are_arrays(given[0]) and are_arrays(given[1])):
        return args, dict(kwargs)
    if len(given) > 2:
        raise ConfigError(
            f"what comes after the labels in {method} has no names",
            expected=f"{method}(x, y, {_EXAMPLES.get(method, 'batch_size=32')})",
            received=", ".join(shown(value) for value in given[2:]),
            hint="Keras' order of the further arguments is another one than sparkdl's",
        )
    if are_arrays(options.get("sample_weight")):
        given.append(options.pop("sample_weight"))
    return (tuple(map(_as_array, given)),), options


_EXAMPLES = {"fit": "epochs=5, batch_size=32"}


def are_arrays(value: Any) -> bool:
    """Whether a value is an array, or several in a list, tuple or dict, and no name of a column."""
    if isinstance(value, (list, tuple)):
        return not value or not all(isinstance(part, str) for part in value)
    if isinstance(value, Mapping):
        return bool(value) and all(are_arrays(part) for part in value.values())
    # A Column of Spark has every attribute, its class has not; a NumPy number has no dimension.
    return hasattr(type(value), "__array__") and np.ndim(value) > 0


def _as_array(value: Any) -> Any:
    known = isinstance(value, (list, tuple, Mapping, np.ndarray))
    return value if known else np.asarray(value)
