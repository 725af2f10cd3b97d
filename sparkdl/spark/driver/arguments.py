"""The arguments of ``fit``, checked before anything else happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkdl.config import require_int
from sparkdl.errors import ConfigError

_KERAS_FIT_REFUSED = {
    "steps_per_epoch": "every row is trained once per epoch; take df.limit(n) for fewer",
    "validation_steps": "all validation rows are evaluated",
    "class_weight": "add a column of sample weights and pass sample_weight='column'",
    "x": "pass the data as the first argument",
    "y": "name the label column: label='column'",
}


@dataclass(frozen=True)
class FitOptions:
    """Arguments of Keras' own ``fit`` that :meth:`SparkModel.fit` takes, too."""

    initial_epoch: int = 0
    check_data: bool = False

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> FitOptions:
        """The options in ``arguments``; any other name is refused.

        Raises:
            ConfigError: Not an argument of fit; the hint says what to do instead.
        """
        known = set(cls.__dataclass_fields__)
        for name in arguments:
            if name in known:
                continue
            raise ConfigError(
                f"fit does not take {name!r}",
                expected="the arguments of fit, and " + ", ".join(sorted(known)),
                received=f"{name}={arguments[name]!r}",
                hint=_KERAS_FIT_REFUSED.get(name, "see help(SparkModel.fit)"),
            )
        options = cls(**arguments)
        require_int("initial_epoch", options.initial_epoch, 0)
        return options


def verbosity(verbose: str | int, auto: int = 1) -> int:
    """0, 1 or 2; ``auto`` for ``'auto'``. Raises ConfigError for anything else."""
    if verbose == "auto":
        return auto
    if verbose not in (0, 1, 2):
        raise ConfigError(
            "verbose must say how much to print",
            expected="'auto', 0, 1 or 2",
            received=repr(verbose),
            hint="0 prints nothing, 1 a progress bar, 2 a line per epoch",
        )
    return int(verbose)


def check_share(name: str, value: Any) -> float:
    """Returns ``value`` if it is a share in [0, 1); raises ConfigError."""
    number = isinstance(value, (int, float)) and value is not False
    if not number or not 0.0 <= value < 1.0:
        raise ConfigError(
            f"{name} must be a share of the rows", expected="0 <= share < 1", received=repr(value)
        )
    return float(value)
