"""Adam and AdamW on flat vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.optimizers.blocks import each_block
from sparkdl.optimizers.compiled import run_compiled
from sparkdl.optimizers.optimizer import FlatOptimizer, State
from sparkdl.values import (
    require,
    require_fraction,
    require_not_negative,
    require_positive,
)
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class FlatAdam(FlatOptimizer):
    """Adam, in the efficient order of section 2 of the paper, as Keras has it.

    ::

        m = beta_1 · m + (1 - beta_1) · g
        v = beta_2 · v + (1 - beta_2) · g²
        weights -= rate · √(1 - beta_2^t) / (1 - beta_1^t) · m / (√v + epsilon)

    Args:
        learning_rate: As for :class:`FlatOptimizer`.
        beta_1: Decay of the mean, in [0, 1).
        beta_2: Decay of the mean square, in [0, 1).
        epsilon: Keeps the division finite.

    Reference: Kingma and Ba, 2015, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    name: ClassVar[str] = "adam"
    keras_class: ClassVar[str] = "Adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self.name, "beta_1", self.beta_1)
        require_fraction(self.name, "beta_2", self.beta_2)
        require_positive(self.name, "epsilon", self.epsilon)

    def init(self, weights: FloatArray) -> State:
        """Both moments, divided by ``1 - beta`` (which saves two operations), and the step."""
        return {
            "scaled_mean": np.zeros_like(weights),
            "scaled_mean_square": np.zeros_like(weights),
            "steps": 0,
        }

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        return {
            "scaled_mean": ("_momentums", 1.0 - self.beta_1),
            "scaled_mean_square": ("_velocities", 1.0 - self.beta_2),
        }

    def step(
        self,
        weights: FloatArray,
        gradient: FloatArray,
        state: State,
        rate: float,
        out: FloatArray,
    ) -> None:
        """One step along ``-gradient``."""
        self._step(weights, gradient, state, rate, 0.0, out)

    def _step(
        self,
        weights: FloatArray,
        gradient: FloatArray,
        state: State,
        rate: float,
        shrink: float,
        out: FloatArray,
    ) -> None:
        state["steps"] += 1
        steps = state["steps"]
        means: FloatArray = state["scaled_mean"]
        squares: FloatArray = state["scaled_mean_square"]
        # With m = (1 - beta_1) M and v = (1 - beta_2) V the step is alpha · M / (√V + eps).
        root = np.sqrt(1.0 - self.beta_2)
        corrected = rate * np.sqrt(1.0 - self.beta_2**steps) / (1.0 - self.beta_1**steps)
        alpha = np.float32(-corrected * (1.0 - self.beta_1) / root)
        epsilon = np.float32(self.epsilon / root)
        beta_1, beta_2 = np.float32(self.beta_1), np.float32(self.beta_2)
        keep = np.float32(1.0 - rate * shrink)
        scalars = (beta_1, beta_2, epsilon, alpha, keep)
        if run_compiled(_loop, weights, out, (gradient, means, squares), scalars):
            return

        def body(part: slice, step: FloatArray) -> None:
            g, mean, square = gradient[part], means[part], squares[part]
            np.multiply(g, g, out=step)
            np.multiply(square, beta_2, out=square)
            np.add(square, step, out=square)
            np.sqrt(square, out=step)
            np.add(step, epsilon, out=step)
            np.multiply(mean, beta_1, out=mean)
            np.add(mean, g, out=mean)
            np.divide(mean, step, out=step)
            np.multiply(step, alpha, out=step)
            if shrink:
                np.multiply(weights[part], keep, out=out[part])
                np.add(out[part], step, out=out[part])
            else:
                np.add(weights[part], step, out=out[part])

        each_block(weights.size, body, 1)


def _loop(
    weights: FloatArray,
    gradient: FloatArray,
    means: FloatArray,
    squares: FloatArray,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    alpha: float,
    keep: float,
) -> None:
    for i in range(weights.size):
        squares[i] = squares[i] * beta_2 + gradient[i] * gradient[i]
        means[i] = means[i] * beta_1 + gradient[i]
        step = means[i] / (np.sqrt(squares[i]) + epsilon) * alpha
        weights[i] = weights[i] * keep + step


@dataclass(frozen=True)
class FlatAdamW(FlatAdam):
    """Adam with decoupled weight decay: ``weights *= 1 - rate · weight_decay``, then Adam's step.

    Decay acts on every trained coordinate; flat weights know no variable names to leave out.

    Args:
        learning_rate, beta_1, beta_2, epsilon: As for :class:`FlatAdam`.
        weight_decay: The decay per unit of learning rate.

    Reference: Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization",
    arXiv:1711.05101.
    """

    weight_decay: float = 0.004

    name: ClassVar[str] = "adamw"
    keras_class: ClassVar[str] = "AdamW"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self.name, "weight_decay", self.weight_decay)
        rate = self.learning_rate or 0.0
        require(
            rate * self.weight_decay < 1,
            self.name,
            "weight_decay",
            "learning_rate · weight_decay below 1",
            self.weight_decay,
        )

    def step(
        self,
        weights: FloatArray,
        gradient: FloatArray,
        state: State,
        rate: float,
        out: FloatArray,
    ) -> None:
        """Decay, then one Adam step along ``-gradient``."""
        self._step(weights, gradient, state, rate, self.weight_decay, out)
