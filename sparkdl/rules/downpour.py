"""DOWNPOUR: every worker's change is added to the center, without waiting; ADAG: by the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.optimizers.flat import take_adagrad_step
from sparkdl.rules.rule import Commit, Rule, State, learning_rate_of, require_payload
from sparkdl.settings.values import require_bool, require_positive
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class Downpour(Rule):
    """Adds each worker's whole change: ``center += delta``.

    The deltas of p workers add up, so the default window shrinks with their number; with many, an
    exchange after each batch learns best (``benchmarks/rules.py``). It also follows the
    length of the worker's epoch: the paper's 5 batches are too long for one of 60
    (``benchmarks/rules.py``).

    At a high learning rate even two changes add up to too much: workers see that and scale theirs
    down (:mod:`sparkdl.ps.damping`).

    Args:
        damping: Whether they do; False is the paper's rule.

    Reference: Dean et al., 2012, "Large Scale Distributed Deep Networks" (NIPS), section 4.1.
    """

    damping: bool = True

    name: ClassVar[str] = "downpour"
    default_window: ClassVar[int] = AUTO_WINDOW

    def __post_init__(self) -> None:
        require_bool(self.name, "damping", self.damping)

    @property
    def damps(self) -> bool:
        return self.damping


@dataclass(frozen=True)
class DownpourAdagrad(Rule):
    """DOWNPOUR whose server has one Adagrad learning rate per coordinate.

    ::

        a      += g²
        center -= gamma · g / (√a + epsilon)

    ``g`` is the gradient of the worker's window. With payload ``'delta'`` (the worker trains with
    plain SGD in between) it is recovered as ``g = -delta / learning_rate``, the *sum* over the
    window; with payload ``'gradient'`` it is the mean gradient that the worker sends. As a constant
    factor of ``g`` cancels in ``g / √Σg²``, both give the same steps when windows are equally long.

    Args:
        gamma: Step size per coordinate.
        epsilon: Keeps the division finite where all gradients so far were 0.
        payload: What the worker sends.

    Reference: Dean et al., 2012, "Large Scale Distributed Deep Networks" (NIPS); Duchi, Hazan and
    Singer, 2011, "Adaptive Subgradient Methods" (JMLR 12).
    """

    gamma: float = 0.01
    epsilon: float = 1e-7
    payload: Literal["delta", "gradient"] = "delta"

    name: ClassVar[str] = "downpour_adagrad"
    default_window: ClassVar[int] = 5
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self.name, "gamma", self.gamma)
        require_positive(self.name, "epsilon", self.epsilon)
        require_payload(self.name, self.payload)

    def init(self, center: FloatArray) -> State:
        """One sum of squared gradients per coordinate, from 0."""
        return {"sum_of_squares": np.zeros_like(center)}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One Adagrad step; raises ConfigError for deltas without a learning rate."""
        scale = 1.0 if self.payload == "gradient" else -1.0 / learning_rate_of(self.name, commit)
        take_adagrad_step(
            center, delta, state["sum_of_squares"], -self.gamma, out,
            gradient_per_sent=scale, beside_root=self.epsilon,
        )  # fmt: skip


@dataclass(frozen=True)
class Adag(Rule):
    """Adds each change divided by its number of batches: ``center += delta / window``.

    The window is the number of batches in this commit, so the shorter last window of an epoch is
    divided by its own length. A window of 1 is DOWNPOUR. Of the steps that p workers take the
    center keeps p / window. So the rule suits as many workers as a window has batches, or a
    learning rate that is higher by window / p.

    Reference: Hermans, Spanakis and Möckel, 2017, "Accumulated Gradient Normalization",
    arXiv:1710.02368.
    """

    name: ClassVar[str] = "adag"
    default_window: ClassVar[int] = 12

    def share_of(self, commit: Commit) -> float:
        return 1.0 / max(commit.batches, 1)
