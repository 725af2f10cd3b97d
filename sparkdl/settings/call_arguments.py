"""The arguments of a call: one that it does not take is answered with those that it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ParamSpec, TypeVar

from sparkdl.errors import ConfigError, SparkDLError, UnknownArgumentError, fold

P = ParamSpec("P")
R = TypeVar("R")


def lists_its_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A function, method or constructor that lists its arguments when it is given another one.

    Raises:
        UnknownArgumentError: From calls of the function; a ``TypeError``, as Python's own.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    is_method = len(known) < len(parameters)
    kind = "argument" if function.__name__ == "__init__" else f"argument of {function.__name__}"

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                owner = type(args[0]) if is_method else object
                hint = taken_in_an_object(parameters, name)
                hint = hint or taken_elsewhere(owner, function.__name__, name)
                raise UnknownArgumentError(kind, name, known, hint)
        try:
            return function(*args, **kwargs)
        except SparkDLError as error:
            raise fold(error) from error.__cause__

    return shows_signature(checked, function)


def shows_signature(wrapper: Callable[P, R], function: Callable[..., Any]) -> Callable[P, R]:
    """A wrapper that shows a function's arguments also to ``inspect.getfullargspec``, which looks
    at no ``__wrapped__``."""
    wrapper.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return wrapper


def parameters_of(owner: type, method: str) -> list[str]:
    """The names of a method's arguments, without ``self``; none where there is no such method."""
    function = getattr(owner, method, None)
    names = inspect.signature(function).parameters if inspect.isfunction(function) else ()
    return [name for name in names if name != "self"]


_REPLACED = {
    "timeout_s": ("limits", "Limits(collective_timeout_s=...)"),
    "tf_config": ("distributed", "'tensorflow'"),
}
"""Arguments that a user may look for -> those that say it."""


def taken_in_an_object(parameters: Mapping[str, inspect.Parameter], name: str) -> str:
    """A hint where what was given to a call is a field of one of its settings objects."""
    for argument, parameter in parameters.items():
        settings = parameter.default
        if is_dataclass(settings) and name in (field.name for field in fields(settings)):
            owner = type(settings).__name__
            return (
                f"it is a field of {owner}: {argument}={owner}({name}=...), from sparkdl import "
                f"{owner}"
            )
    argument, value = _REPLACED.get(name, ("", ""))
    return f"{argument}={value}" if argument in parameters else ""


def taken_elsewhere(owner: type, method: str, name: str) -> str:
    """A hint where a constructor, or ``fit``, takes what was given to another method of a class."""
    for other, call in (("__init__", f"{owner.__name__}(model, {name}=...)"),
                        ("fit", f"fit(data, {name}=...)")):  # fmt: skip
        if other != method and name in parameters_of(owner, other):
            return f"it is an argument of another call: {call}"
    return ""


def require_call(
    what: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hint: str = "",
) -> None:
    """Refuses arguments that a function does not take.

    Args:
        what: What the function is, for the message.
        function: A function; nothing is refused of one whose signature Python does not know.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        hint: What to do.

    Raises:
        ConfigError: There are too many, too few, or others than it takes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions of C say nothing
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [repr(arg)[:60] for arg in args] + [f"{name}=..." for name in kwargs]
        raise ConfigError(
            f"{what} does not take these arguments",
            expected=f"{getattr(function, '__name__', type(function).__name__)}{signature}",
            received=f"({', '.join(given)}): {error}", hint=hint,
        ) from error  # fmt: skip
