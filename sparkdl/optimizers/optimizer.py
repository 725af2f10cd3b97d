"""The base of optimizers on flat float32 vectors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sparkdl.settings.values import require_positive
from sparkdl.weights import FloatArray

State = dict[str, Any]
Checks = Mapping[str, Callable[[str, str, Any], None]]
"""Option -> what refuses a value of it, given the optimizer's name, the option and the value."""


@dataclass(frozen=True)
class FlatOptimizer(abc.ABC):
    """Base of the optimizers: frozen options; what changes lives in the state of :meth:`init`.

    They treat elements one by one. So a step on a slice of the weights, with its slice of the
    state, gives what a step on the whole would give there.

    Args:
        learning_rate: Step size; None: the caller's at each step.
    """

    learning_rate: float | None = None

    name: ClassVar[str] = ""
    keras_class: ClassVar[str] = ""
    """Name of the Keras optimizer that takes the same steps."""

    checks: ClassVar[Checks] = {}

    def __post_init__(self) -> None:
        require_positive(self.name, "learning_rate", self.learning_rate, or_none=True)
        for option, check in self.checks.items():
            check(self.name, option, getattr(self, option))

    def init(self, weights: FloatArray) -> State:
        """The state before the first step: a flat dict of float32 arrays, ints or floats."""
        return {name: np.zeros_like(weights) for name in self.keras_slots()}

    @abc.abstractmethod
    def step(
        self, weights: FloatArray, gradient: FloatArray, state: State, rate: float, out: FloatArray
    ) -> None:
        """One step along ``-gradient`` into ``out``, which may be ``weights``.

        Changes ``state``; ``gradient`` stays as it is. ``rate`` is the learning rate.
        """

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        """The attributes of the Keras optimizer of the same steps that have the same state.

        Returns:
            Each array of the state -> the attribute with Keras' variables, and a factor: Keras'
            value is this one times the factor.
        """
        return {}

    def keras_config(self) -> dict[str, Any]:
        return {"class_name": self.keras_class, "config": dict(vars(self))}
