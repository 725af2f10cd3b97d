"""Optimizers that run on the server: SGD, Adagrad, RMSprop, Adam and AdamW on the flat center.

Workers send the mean gradient ``g`` of their window and take the new center back. Each optimizer is
written on float32 vectors, without Keras, and takes the same steps as the Keras optimizer of its
name with the same options: one worker is local training with that optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from sparkdl.ps.rules.base import Commit, Rule, State
from sparkdl.ps.rules.blocks import add_scaled, blocks, scratch
from sparkdl.ps.rules.options import (
    learning_rate_of,
    require,
    require_fraction,
    require_not_negative,
    require_positive,
)
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class ServerOptimizer(Rule):
    """Base of the optimizers on the server.

    Args:
        learning_rate: Step size; None takes the worker's learning rate of each commit (so that a
            schedule or a callback on the worker counts).
    """

    learning_rate: float | None = None

    payload: ClassVar[Literal["delta", "gradient"]] = "gradient"  # type: ignore[misc]
    default_window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            require_positive(self.name, "learning_rate", self.learning_rate)

    def rate(self, commit: Commit) -> float:
        """The learning rate of this step.

        Raises:
            ConfigError: Neither the rule nor the commit has one.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return learning_rate_of(self.name, commit)


@dataclass(frozen=True)
class SGD(ServerOptimizer):
    """Gradient descent on the server, with momentum or Nesterov momentum if asked.

    ::

        v = momentum · v - rate · g
        center += v                          (momentum)
        center += momentum · v - rate · g    (Nesterov)

    Args:
        learning_rate: As for :class:`ServerOptimizer`.
        momentum: In [0, 1); 0 is plain gradient descent.
        nesterov: Whether to look ahead.

    Reference: Sutskever, Martens, Dahl and Hinton, 2013, "On the importance of initialization and
    momentum in deep learning" (ICML).
    """

    momentum: float = 0.0
    nesterov: bool = False

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self.name, "momentum", self.momentum)

    def init(self, center: FloatArray) -> State:
        """The velocity, from 0, if there is momentum."""
        return {"velocity": np.zeros_like(center)} if self.momentum else {}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One step along ``-delta``, the gradient."""
        rate = self.rate(commit)
        if not self.momentum:
            add_scaled(center, delta, -rate, out)
            return
        velocities: FloatArray = state["velocity"]
        step_per_gradient, momentum = np.float32(-rate), np.float32(self.momentum)
        buffer = scratch(center.size)
        for part in blocks(center.size):
            velocity, step = velocities[part], buffer[: part.stop - part.start]
            np.multiply(delta[part], step_per_gradient, out=step)
            if self.nesterov:
                # Kept already multiplied by momentum for the next step, which saves a pass.
                np.add(velocity, step, out=velocity)
                np.multiply(velocity, momentum, out=velocity)
                np.add(step, velocity, out=step)
                np.add(center[part], step, out=out[part])
            else:
                np.multiply(velocity, momentum, out=velocity)
                np.add(velocity, step, out=velocity)
                np.add(center[part], velocity, out=out[part])


@dataclass(frozen=True)
class Adagrad(ServerOptimizer):
    """Adagrad on the server: ``a += g²; center -= rate · g / √(a + epsilon)``.

    Args:
        learning_rate: As for :class:`ServerOptimizer`.
        initial_accumulator_value: Where ``a`` starts.
        epsilon: Keeps the division finite.

    Reference: Duchi, Hazan and Singer, 2011, "Adaptive Subgradient Methods" (JMLR 12).
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        start = self.initial_accumulator_value
        require_not_negative(self.name, "initial_accumulator_value", start)
        require_positive(self.name, "epsilon", self.epsilon)

    def init(self, center: FloatArray) -> State:
        """The sums of squared gradients."""
        return {"accumulator": np.full_like(center, self.initial_accumulator_value)}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One step along ``-delta``, the gradient."""
        accumulators: FloatArray = state["accumulator"]
        rate, epsilon = np.float32(-self.rate(commit)), np.float32(self.epsilon)
        buffer = scratch(center.size)
        for part in blocks(center.size):
            gradient, total, step = (
                delta[part],
                accumulators[part],
                buffer[: part.stop - part.start],
            )
            np.multiply(gradient, gradient, out=step)
            np.add(total, step, out=total)
            np.add(total, epsilon, out=step)
            np.sqrt(step, out=step)
            np.divide(gradient, step, out=step)
            np.multiply(step, rate, out=step)
            np.add(center[part], step, out=out[part])


@dataclass(frozen=True)
class RMSprop(ServerOptimizer):
    """RMSprop on the server.

    ::

        v = rho · v + (1 - rho) · g²
        a = rho · a + (1 - rho) · g                                (centered only)
        s = rate · g / √(v - a² + epsilon)                         (a = 0 unless centered)
        m = momentum · m + s;   center -= m                        (m = s without momentum)

    Args:
        learning_rate: As for :class:`ServerOptimizer`.
        rho: Decay of the means, in [0, 1).
        momentum: In [0, 1).
        epsilon: Keeps the division finite.
        centered: Whether the gradients' variance takes the place of their mean square.

    Reference: Tieleman and Hinton, 2012, "Lecture 6.5: RMSprop" (Coursera).
    """

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    name: ClassVar[str] = "rmsprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self.name, "rho", self.rho)
        require_fraction(self.name, "momentum", self.momentum)
        require_positive(self.name, "epsilon", self.epsilon)

    def init(self, center: FloatArray) -> State:
        """The running means that the options need, from 0."""
        state: State = {"mean_square": np.zeros_like(center)}
        if self.centered:
            state["mean"] = np.zeros_like(center)
        if self.momentum:
            state["momentum"] = np.zeros_like(center)
        return state

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One step along ``-delta``, the gradient."""
        rate, epsilon = np.float32(-self.rate(commit)), np.float32(self.epsilon)
        rho, rest = np.float32(self.rho), np.float32(1.0 - self.rho)
        momentum = np.float32(self.momentum)
        means: FloatArray | None = state.get("mean")
        velocities: FloatArray | None = state.get("momentum")
        squares: FloatArray = state["mean_square"]
        first, second = scratch(center.size), scratch(center.size)
        for part in blocks(center.size):
            n = part.stop - part.start
            gradient, mean_square, step, square = delta[part], squares[part], first[:n], second[:n]
            np.multiply(mean_square, rho, out=mean_square)
            np.multiply(gradient, rest, out=step)
            np.multiply(step, gradient, out=square)
            np.add(mean_square, square, out=mean_square)
            if means is None:
                np.add(mean_square, epsilon, out=square)
            else:
                mean = means[part]
                np.multiply(mean, rho, out=mean)
                np.add(mean, step, out=mean)
                np.multiply(mean, mean, out=square)
                np.subtract(mean_square, square, out=square)
                np.add(square, epsilon, out=square)
            np.sqrt(square, out=square)
            np.divide(gradient, square, out=step)
            np.multiply(step, rate, out=step)
            if velocities is not None:
                velocity = velocities[part]
                np.multiply(velocity, momentum, out=velocity)
                np.add(velocity, step, out=velocity)
                step = velocity
            np.add(center[part], step, out=out[part])


@dataclass(frozen=True)
class Adam(ServerOptimizer):
    """Adam on the server; step t is the t-th commit of all workers.

    ::

        m = beta_1 · m + (1 - beta_1) · g
        v = beta_2 · v + (1 - beta_2) · g²
        center -= rate · √(1 - beta_2^t) / (1 - beta_1^t) · m / (√v + epsilon)

    The efficient order of section 2 of the paper, as Keras has it.

    Args:
        learning_rate: As for :class:`ServerOptimizer`.
        beta_1: Decay of the mean, in [0, 1).
        beta_2: Decay of the mean square, in [0, 1).
        epsilon: Keeps the division finite.

    Reference: Kingma and Ba, 2015, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self.name, "beta_1", self.beta_1)
        require_fraction(self.name, "beta_2", self.beta_2)
        require_positive(self.name, "epsilon", self.epsilon)

    def init(self, center: FloatArray) -> State:
        """Both moments, divided by ``1 - beta`` (which saves two operations), and the step."""
        return {
            "scaled_mean": np.zeros_like(center),
            "scaled_mean_square": np.zeros_like(center),
            "steps": 0,
        }

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One step along ``-delta``, the gradient."""
        self._step(center, delta, state, commit, 0.0, out)

    def _step(
        self,
        center: FloatArray,
        delta: FloatArray,
        state: State,
        commit: Commit,
        shrink: float,
        out: FloatArray,
    ) -> None:
        rate = self.rate(commit)
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
        buffer = scratch(center.size)
        for part in blocks(center.size):
            gradient, step = delta[part], buffer[: part.stop - part.start]
            mean, square = means[part], squares[part]
            np.multiply(gradient, gradient, out=step)
            np.multiply(square, beta_2, out=square)
            np.add(square, step, out=square)
            np.sqrt(square, out=step)
            np.add(step, epsilon, out=step)
            np.multiply(mean, beta_1, out=mean)
            np.add(mean, gradient, out=mean)
            np.divide(mean, step, out=step)
            np.multiply(step, alpha, out=step)
            if shrink:
                np.multiply(center[part], keep, out=out[part])
                np.add(out[part], step, out=out[part])
            else:
                np.add(center[part], step, out=out[part])


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: ``center *= 1 - rate · weight_decay``, then Adam's step.

    Decay acts on every trained coordinate; the flat center knows no variable names to leave out.

    Args:
        learning_rate, beta_1, beta_2, epsilon: As for :class:`Adam`.
        weight_decay: The decay per unit of learning rate.

    Reference: Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization",
    arXiv:1711.05101.
    """

    weight_decay: float = 0.004

    name: ClassVar[str] = "adamw"

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

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """Decay, then one Adam step along ``-delta``, the gradient."""
        self._step(center, delta, state, commit, self.weight_decay, out)
