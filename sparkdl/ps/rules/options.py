"""Checks of the rules' constructor arguments."""

from __future__ import annotations

import math
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.optimizers.options import (
    is_number,
    require,
    require_fraction,
    require_not_negative,
    require_positive,
)
from sparkdl.ps.rules.rule import Commit

__all__ = [
    "is_number",
    "learning_rate_of",
    "require",
    "require_fraction",
    "require_not_negative",
    "require_payload",
    "require_positive",
]


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
