"""Single values that a user gives: checked, made Python's own, and shown in errors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from sparkdl.errors import ConfigError, UnknownNameError

_SHOWN_CHARS = 200


def shown(value: Any) -> str:
    """A value for an error message: its ``repr``, or its kind and shape where that is long."""
    kind = type(value)  # a Column of Spark has every attribute, its class has not
    if hasattr(kind, "dtype") and hasattr(kind, "shape") and value.shape != ():
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return (
        text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({type(value).__name__})"
    )


def bare(value: Any) -> Any:
    """A number, flag or text of NumPy as Python's own; anything else as it is."""
    kind = type(value)  # a Column of Spark has every attribute, its class has not
    is_one = hasattr(kind, "dtype") and hasattr(kind, "item") and value.shape == ()
    return value.item() if is_one else value


def bare_numbers(value: Any) -> Any:
    """A number, or a copy of a dict of numbers, without NumPy's."""
    if isinstance(value, Mapping):
        return {name: bare(number) for name, number in value.items()}
    return bare(value)


def bare_options(thing: object) -> dict[str, Any]:
    """The attributes of a rule or a codec, without NumPy's numbers, which JSON cannot hold."""
    return {name: bare(value) for name, value in vars(thing).items()}


def is_number(value: Any) -> bool:
    """Whether it is a real number, NumPy's too; True and False are none."""
    value = bare(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    """Whether it is a real number, and neither NaN nor infinite."""
    return is_number(value) and math.isfinite(value)


def require_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int if it is a whole number, NumPy's too, of at least ``least``.

    Raises:
        ConfigError: It is not, or above ``most``.
    """
    number = bare(value)
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or number < least or (most is not None and number > most):
        limit = "" if most is None else f" and at most {most}"
        raise ConfigError(
            f"{name} must be a whole number of at least {least}{limit}",
            expected=f"a whole number >= {least}" + (f" and <= {most}" if most else ""),
            received=shown(value),
        )
    return int(number)


def require_above_zero(name: str, value: Any) -> float:
    """``value`` as a float if it is a number above 0, NumPy's too; raises ConfigError."""
    if not is_number(value) or not value > 0:
        raise ConfigError(
            f"{name} must be a number above 0", expected="a number above 0", received=shown(value)
        )
    return float(value)


def require_seconds(name: str, value: Any) -> float:
    """``value`` as a plain number if it is one above 0, NumPy's too; raises ConfigError."""
    if not is_number(value) or not value > 0:
        raise ConfigError(
            f"{name} must be a time above 0", expected="seconds > 0", received=shown(value)
        )
    seconds: float = bare(value)
    return seconds


def require_flag(name: str, value: Any) -> bool:
    """``value`` as a bool if it is True or False, NumPy's too; raises ConfigError."""
    flag = bare(value)
    if not isinstance(flag, bool):
        raise ConfigError(
            f"{name} must be True or False", expected="True or False", received=shown(value)
        )
    return flag


def require_path(name: str, value: Any, hint: str = "") -> str:
    """``value`` as a text if it is a path or URI, also a ``pathlib`` one; raises ConfigError."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(
            f"{name} must say where a file or folder is",
            expected="a path or URI: a text that is not empty, or of pathlib",
            received=shown(value),
            hint=hint,
        )  # fmt: skip
    return path


def require_objects(custom_objects: Any) -> dict[str, Any]:
    """A copy of custom objects, which are empty for None; raises ConfigError."""
    if custom_objects is None:
        return {}
    named = isinstance(custom_objects, Mapping)
    if not named or not all(isinstance(name, str) for name in custom_objects):
        nameless = custom_objects if isinstance(custom_objects, (list, tuple)) else ()
        names = [getattr(thing, "__name__", "") for thing in nameless]
        raise ConfigError(
            "custom_objects must say what a model's file calls classes and functions",
            expected="a dict: name -> class or function",
            received=shown(custom_objects),
            hint="custom_objects={" + ", ".join(f"{n!r}: {n}" for n in names) + "}"
            if names and all(names)
            else "custom_objects={'MyLayer': MyLayer}",
        )
    return dict(custom_objects)


def require_name(kind: str, value: Any, known: Iterable[str], hint: str = "") -> str:
    """Returns ``value`` if it is one of ``known``; raises UnknownNameError."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise UnknownNameError(kind, value, names, hint)
    return str(value)


def require(
    ok: bool, owner: str, option: str, expected: str, received: Any, hint: str = ""
) -> None:
    """Raises ConfigError unless an option of a rule, a codec, an optimizer or a searcher is ``ok``.

    Args:
        ok: Whether the value is allowed.
        owner: Name of what has the option, as the user writes it, e.g. ``'diloco'``.
        option: Name of the option.
        expected: The values that are allowed, in words.
        received: The value.
        hint: What to do.
    """
    if not ok:
        raise ConfigError(
            f"{owner!r} cannot take this value for its option {option!r}",
            expected=expected,
            received=f"{option}={received!r}",
            hint=hint,
        )


def require_positive(owner: str, option: str, value: Any, *, or_none: bool = False) -> None:
    """Raises ConfigError unless ``value`` is a finite number above 0 (or None, if that may be)."""
    ok = (is_finite_number(value) and value > 0) or (or_none and value is None)
    require(ok, owner, option, "a number above 0" + ", or None" * or_none, value)


def require_bool(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is True or False."""
    require(isinstance(bare(value), bool), owner, option, "True or False", value)


def require_not_negative(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is a finite number, 0 or above."""
    require(is_finite_number(value) and value >= 0, owner, option, "a number, 0 or above", value)


def require_fraction(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``0 <= value < 1``."""
    ok = is_finite_number(value) and 0 <= value < 1
    require(ok, owner, option, "a number in [0, 1)", value)


def require_share(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``0 < value <= 1``."""
    ok = is_finite_number(value) and 0 < value <= 1
    require(ok, owner, option, "a number in (0, 1]", value)


def require_whole(
    owner: str, option: str, value: Any, least: int | None = None, *, or_none: bool = False
) -> None:
    """Raises ConfigError unless ``value`` is a whole number of at least ``least`` (or None)."""
    number = bare(value)
    ok = isinstance(number, int) and not isinstance(number, bool)
    ok = (ok and (least is None or value >= least)) or (or_none and value is None)
    expected = "a whole number" if least is None else f"a whole number from {least}"
    require(ok, owner, option, expected + ", or None" * or_none, value)


def require_one_of(owner: str, option: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raises ConfigError unless ``value`` is one of ``known``."""
    require(value in known, owner, option, " or ".join(map(repr, known)), value)
