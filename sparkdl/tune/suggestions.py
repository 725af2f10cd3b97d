"""``Trial``: what a user's ``build(trial)`` gets, and asks for its hyper-parameters."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from sparkdl.errors import ConfigError

Value = bool | int | float | str | None
"""A hyper-parameter's value: plain, so that a study can be written and read again."""
T = TypeVar("T", bound=Value)


@dataclass(frozen=True)
class Space:
    """The values that one hyper-parameter can take.

    Args:
        kind: ``'float'``, ``'int'`` or ``'categorical'``.
        low: The smallest number.
        high: The largest number, included.
        step: Between two values; None for any float.
        log: Drawn evenly over the logarithm.
        choices: Of a categorical.
    """

    kind: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()

    def draw(self, rng: np.random.Generator) -> Value:
        """One value."""
        if self.kind == "categorical":
            return self.choices[int(rng.integers(len(self.choices)))]
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        elif self.step is not None:
            steps = math.floor((self.high - self.low) / self.step + 1e-9)
            value = self.low + self.step * int(rng.integers(steps + 1))
        else:
            value = rng.uniform(self.low, self.high)
        return self.nearest(value)

    def nearest(self, value: float) -> Value:
        """The value of this space that is nearest to a number."""
        if self.step is not None and not self.log:
            value = self.low + self.step * round((value - self.low) / self.step)
        value = min(max(value, self.low), self.high)
        return round(value) if self.kind == "int" else float(value)


Draw = Callable[[str, Space], Value]
"""Draws the value of a hyper-parameter, by its name and what it can be."""


class Trial:
    """One set of hyper-parameters; ``build(trial)`` asks it for each by name.

    The same seed, number and name give the same value, in any order and on any machine. A name that
    is asked again gives the same value again.

    Args:
        number: Of the trial, from 0.
        seed: Of the search.
        given: Values that are not drawn (a grid's, or those of a resumed trial).
        draw: Draws the others; None for :meth:`draw`.
    """

    def __init__(
        self,
        number: int,
        seed: int = 0,
        given: Mapping[str, Value] | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.number = number
        self.params: dict[str, Value] = {}
        self.spaces: dict[str, Space] = {}
        self._seed = seed
        self._given = dict(given or {})
        self._draw = draw or self.draw

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A float in ``[low, high]``.

        Args:
            name: Of the hyper-parameter.
            low: The smallest value.
            high: The largest value.
            step: Only ``low``, ``low + step``, ... are drawn.
            log: Drawn evenly over the logarithm; ``low`` must be above 0.

        Raises:
            ConfigError: The range is empty, or the name was asked with another range.
        """
        _check_range(name, low, high, step, log)
        return cast(float, self._suggest(name, Space("float", low, high, step, log)))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """A whole number in ``[low, high]``; see :meth:`suggest_float`."""
        _check_range(name, low, high, step, log)
        return cast(int, self._suggest(name, Space("int", low, high, step, log)))

    def suggest_categorical(self, name: str, choices: Sequence[T]) -> T:
        """One of ``choices``: strings, numbers, booleans or None.

        Raises:
            ConfigError: There are none, or one is of another kind.
        """
        if not choices or any(c is not None and not isinstance(c, Value) for c in choices):
            raise ConfigError(
                f"{name!r} has no such choices",
                expected="at least one string, number, boolean or None",
                received=repr(choices),
                hint="choose a name, and make the object from the name in build",
            )
        return cast(T, self._suggest(name, Space("categorical", choices=tuple(choices))))

    def draw(self, name: str, space: Space) -> Value:
        """A value by chance, the same for the same seed, number and name."""
        seed = (self._seed, self.number, zlib.crc32(name.encode()))
        return space.draw(np.random.default_rng(seed))

    def _suggest(self, name: str, space: Space) -> Value:
        if self.spaces.setdefault(name, space) != space:
            raise ConfigError(
                f"the hyper-parameter {name!r} was asked twice, with other values to choose from",
                expected=repr(self.spaces[name]),
                received=repr(space),
                hint="one name for each hyper-parameter",
            )
        if name not in self.params:
            given = name in self._given
            self.params[name] = self._given[name] if given else self._draw(name, space)
        return self.params[name]


def _check_range(name: str, low: float, high: float, step: float | None, log: bool) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high) or (log and low <= 0):
        raise ConfigError(
            f"the range of the hyper-parameter {name!r} has no values",
            expected="low <= high" + ", and low > 0 for log=True" * log,
            received=f"low={low!r}, high={high!r}",
        )
    if step is not None and not step > 0:
        raise ConfigError(
            f"the step of the hyper-parameter {name!r} leads nowhere",
            expected="a number above 0",
            received=f"step={step!r}",
        )
