"""Checks of constructor arguments, for rules, codecs and optimizers alike."""

from __future__ import annotations

import math
from typing import Any

from sparkdl.errors import ConfigError


def require(
    ok: bool, owner: str, option: str, expected: str, received: Any, hint: str = ""
) -> None:
    """Raises ConfigError unless ``ok``.

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


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite real number (a bool is not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(owner: str, option: str, value: Any, *, or_none: bool = False) -> None:
    """Raises ConfigError unless ``value`` is a finite number above 0 (or None, if that may be)."""
    ok = (is_number(value) and value > 0) or (or_none and value is None)
    require(ok, owner, option, "a number above 0" + ", or None" * or_none, value)


def require_bool(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is True or False."""
    require(isinstance(value, bool), owner, option, "True or False", value)


def require_not_negative(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is a finite number, 0 or above."""
    require(is_number(value) and value >= 0, owner, option, "a number, 0 or above", value)


def require_fraction(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``0 <= value < 1``."""
    ok = is_number(value) and 0 <= value < 1
    require(ok, owner, option, "a number in [0, 1)", value)


def require_share(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``0 < value <= 1``."""
    ok = is_number(value) and 0 < value <= 1
    require(ok, owner, option, "a number in (0, 1]", value)


def require_whole(
    owner: str, option: str, value: Any, least: int | None = None, *, or_none: bool = False
) -> None:
    """Raises ConfigError unless ``value`` is a whole number of at least ``least`` (or None)."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    ok = (ok and (least is None or value >= least)) or (or_none and value is None)
    expected = "a whole number" if least is None else f"a whole number from {least}"
    require(ok, owner, option, expected + ", or None" * or_none, value)


def require_one_of(owner: str, option: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raises ConfigError unless ``value`` is one of ``known``."""
    require(value in known, owner, option, " or ".join(map(repr, known)), value)
