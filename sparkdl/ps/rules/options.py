"""Checks of the rules' constructor arguments."""

from __future__ import annotations

import math
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.ps.rules.base import Commit


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


def require_payload(rule: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is ``'delta'`` or ``'gradient'``."""
    require(value in ("delta", "gradient"), rule, "payload", "'delta' or 'gradient'", value)


def learning_rate_of(rule: str, commit: Commit) -> float:
    """The learning rate of a commit whose rule cannot do without it.

    Raises:
        ConfigError: It is 0 or not finite.
    """
    rate = commit.learning_rate
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(
            f"rule {rule!r}: worker {commit.worker} committed without a learning rate",
            expected="a learning rate above 0: the rule turns a delta into a gradient with it",
            received=repr(rate),
            hint="compile the model with an optimizer that has a learning rate above 0, "
            "or choose rule='dynsgd', which needs none",
        )
    return rate
