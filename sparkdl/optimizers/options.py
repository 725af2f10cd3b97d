"""Checks of the constructor arguments of rules and optimizers."""

from __future__ import annotations

import math
from typing import Any

from sparkdl.errors import ConfigError


def require(ok: bool, rule: str, option: str, expected: str, received: Any, hint: str = "") -> None:
    """Raises ConfigError, in four beats, unless ``ok``."""
    if not ok:
        raise ConfigError(
            f"rule {rule!r}: wrong option {option!r}",
            expected=expected,
            received=repr(received),
            hint=hint,
        )


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite real number (a bool is not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(rule: str, option: str, value: Any, hint: str = "") -> None:
    """Raises ConfigError unless ``value`` is a finite number above 0."""
    require(is_number(value) and value > 0, rule, option, "a number above 0", value, hint)


def require_not_negative(rule: str, option: str, value: Any, hint: str = "") -> None:
    """Raises ConfigError unless ``value`` is a finite number, 0 or above."""
    require(is_number(value) and value >= 0, rule, option, "a number, 0 or above", value, hint)


def require_fraction(rule: str, option: str, value: Any, hint: str = "") -> None:
    """Raises ConfigError unless ``0 <= value < 1``."""
    ok = is_number(value) and 0 <= value < 1
    require(ok, rule, option, "a number in [0, 1)", value, hint)
