"""Rules that repair a stale gradient, or give it less weight: DC-ASGD, gap-aware, DynSGD."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.optimizers.blocks import each_block, run_compiled
from sparkdl.rules.rule import PAYLOAD, Commit, Rule, State, learning_rate_of
from sparkdl.settings.values import (
    POSITIVE_OR_NONE,
    option,
    require_fraction,
    require_not_negative,
    require_positive,
)
from sparkdl.weights import FloatArray


class BackupRule(Rule):
    """Base of rules that compare the center with what each worker last saw.

    The state has one backup per worker, under ``'backup/<rank>'``. Before its first pull a worker
    has the initial center. A commit counts as the first half of a ``push_pull``, after which the
    worker has the center just written. (If it pulls later instead, ``pulled`` corrects that.)
    """

    def init(self, center: FloatArray) -> State:
        return {"initial": center.copy()}

    def pulled(self, center: FloatArray, state: State, worker: int) -> None:
        np.copyto(self.backup(state, worker), center)

    @staticmethod
    def backup(state: State, worker: int) -> FloatArray:
        """The worker's backup, to read and to write; made when first asked for."""
        key = f"backup/{worker}"
        if key not in state:
            state[key] = state["initial"].copy()
        backup: FloatArray = state[key]
        return backup


def _scales(rule: DCASGD | GapAware, commit: Commit) -> tuple[float, float]:
    """The factors that make a step of the center, and a gradient, of what a worker sent.

    Returns:
        ``(to_step, to_gradient)``: the plain ASGD step is ``to_step · sent``, and the mean gradient
        of the window is ``to_gradient · sent``.
    """
    rate = learning_rate_of(rule.name, commit)
    if rule.payload == "gradient":
        return -rate, 1.0
    return 1.0, -1.0 / (rate * max(commit.batches, 1))


@dataclass(frozen=True)
class DCASGD(BackupRule):
    """Delay-compensated ASGD: a first-order estimate of the gradient at the present center.

    ::

        center -= eta · (g + lambda_t · g ⊙ g ⊙ (center - backup))

    ``backup`` is the center at this worker's last pull, one per worker (memory: workers + 1 times
    the model), and ``g ⊙ g`` stands for the Hessian's diagonal. Plain: ``lambda_t`` is
    ``compensation``. Adaptive::

        mean_square = decay · mean_square + (1 - decay) · g ⊙ g
        lambda_t = compensation / √(mean_square + epsilon)

    A worker that sends a delta of L local SGD steps stands for L gradients near ``g = -delta /
    (L · eta)``, so the rule is applied as ``center += delta - L · eta · lambda_t · g² · (center -
    backup)``; with L = 1 that is the paper. With payload ``'gradient'`` the worker sends ``g``, the
    mean gradient of its window, and one step with the worker's learning rate is taken.

    Args:
        compensation: The paper's lambda; None gives 0.04 plain and 2.0 adaptive. 0 is ASGD.
        adaptive: Whether lambda adapts to each coordinate.
        decay: The paper's m, in [0, 1); adaptive only.
        epsilon: Keeps the division finite; adaptive only.
        payload: What the worker sends; ``'delta'`` supposes plain SGD on the worker.

    Reference: Zheng et al., 2017, "Asynchronous Stochastic Gradient Descent with Delay
    Compensation", arXiv:1609.08326, algorithm 2.
    """

    compensation: float | None = option(None, partial(require_not_negative, or_none=True))
    adaptive: bool = False
    decay: float = option(0.95, require_fraction)
    epsilon: float = option(1e-7, require_positive)
    payload: Literal["delta", "gradient"] = option("delta", PAYLOAD)

    name: ClassVar[str] = "dc_asgd"
    default_window: ClassVar[int] = 1
    elementwise: ClassVar[bool] = True

    def init(self, center: FloatArray) -> State:
        """The initial center, and the mean square if adaptive; backups are added later."""
        state = super().init(center)
        if self.adaptive:
            state["mean_square"] = np.zeros_like(center)
        return state

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One compensated step; raises ConfigError for a commit without a learning rate."""
        to_step, to_gradient = _scales(self, commit)
        default = 2.0 if self.adaptive else 0.04
        strength = default if self.compensation is None else self.compensation
        # In terms of what was sent: step = to_step · sent · (1 + slope · sent · gap), as the step
        # is -(a rate) · g and g = to_gradient · sent.
        slope = np.float32(strength * to_gradient)
        scale, one = np.float32(to_step), np.float32(1.0)
        stale = self.backup(state, commit.worker)
        squares: FloatArray | None = state["mean_square"] if self.adaptive else None
        root_new = np.float32(np.sqrt(1.0 - self.decay) * to_gradient)
        decay, epsilon = np.float32(self.decay), np.float32(self.epsilon)
        if squares is None:
            scalars: tuple[np.float32, ...] = (slope, scale, one)
            done = run_compiled(_compensated, center, out, (delta, stale), scalars)
        else:
            scalars = (slope, scale, one, decay, root_new, epsilon)
            done = run_compiled(_adaptive, center, out, (delta, stale, squares), scalars)
        if done:
            return

        def body(part: slice, gap: FloatArray, root: FloatArray) -> None:
            sent = delta[part]
            np.subtract(center[part], stale[part], out=gap)
            np.multiply(gap, sent, out=gap)
            np.multiply(gap, slope, out=gap)
            if squares is not None:
                mean_square = squares[part]
                np.multiply(mean_square, decay, out=mean_square)
                np.multiply(sent, root_new, out=root)
                np.multiply(root, root, out=root)
                np.add(mean_square, root, out=mean_square)
                np.add(mean_square, epsilon, out=root)
                np.sqrt(root, out=root)
                np.divide(gap, root, out=gap)
            np.add(gap, one, out=gap)
            np.multiply(gap, sent, out=gap)
            if to_step != 1.0:
                np.multiply(gap, scale, out=gap)
            np.add(center[part], gap, out=out[part])
            stale[part] = out[part]

        each_block(center.size, body, 2)


@dataclass(frozen=True)
class GapAware(BackupRule):
    """Divides each coordinate of a stale step by how far the center moved, in typical steps.

    ::

        center -= eta · g / (1 + |center - stale| / (scale · C))
        v = decay · v + (1 - decay) · g ⊙ g
        C = eta_max · (√(v / (1 - decay^t)) + epsilon)

    ``stale`` is the center at this worker's last pull, one per worker (memory: workers + 2 times
    the model); ``C`` the length of a typical step; ``eta_max`` the highest learning rate so far.
    A worker that sends a delta of L local SGD steps stands for ``g = -delta / (L · eta)``, and the
    whole delta is divided; with payload ``'gradient'`` it sends ``g``, the mean of its window.

    Args:
        scale: How many typical steps of gap halve a step.
        decay: Decay of the running mean of squared gradients, in [0, 1).
        epsilon: Keeps C above 0.
        payload: What the worker sends; ``'delta'`` supposes plain SGD on the worker.

    Reference: Barkai, Hakimi and Schuster, 2020, "Gap-Aware Mitigation of Gradient Staleness",
    arXiv:1909.10802.
    """

    scale: float = option(1.0, require_positive)
    decay: float = option(0.999, require_fraction)
    epsilon: float = option(1e-8, require_positive)
    payload: Literal["delta", "gradient"] = option("delta", PAYLOAD)

    name: ClassVar[str] = "gap_aware"
    default_window: ClassVar[int] = 1
    elementwise: ClassVar[bool] = True

    def init(self, center: FloatArray) -> State:
        """The initial center and the running mean of squares; backups are added later."""
        state = super().init(center)
        state.update(mean_square=np.zeros_like(center), commits=0, highest_rate=0.0)
        return state

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One damped step; raises ConfigError for a commit without a learning rate."""
        to_step, to_gradient = _scales(self, commit)
        state["commits"] += 1
        state["highest_rate"] = max(state["highest_rate"], commit.learning_rate)
        stale = self.backup(state, commit.worker)
        squares: FloatArray = state["mean_square"]
        # The mean square is kept divided by (1 - decay), which saves an operation per coordinate;
        # then C · scale = spread · √mean_square + least.
        reach = self.scale * state["highest_rate"]
        bias = 1.0 - self.decay ** state["commits"]
        spread = np.float32(reach * np.sqrt((1.0 - self.decay) / bias))
        least = np.float32(reach * self.epsilon)
        decay, gradient = np.float32(self.decay), np.float32(to_gradient)
        scale = np.float32(to_step)
        scalars = (decay, gradient, spread, least, scale)
        if run_compiled(_gap_aware, center, out, (delta, stale, squares), scalars):
            return

        def body(part: slice, gap: FloatArray, typical: FloatArray) -> None:
            sent, mean_square = delta[part], squares[part]
            np.multiply(mean_square, decay, out=mean_square)
            np.multiply(sent, gradient, out=typical)
            np.multiply(typical, typical, out=typical)
            np.add(mean_square, typical, out=mean_square)
            np.sqrt(mean_square, out=typical)
            np.multiply(typical, spread, out=typical)
            np.add(typical, least, out=typical)
            np.subtract(center[part], stale[part], out=gap)
            np.abs(gap, out=gap)
            # sent / (1 + gap / C) as sent · C / (C + gap): one division instead of two.
            np.add(gap, typical, out=gap)
            np.divide(typical, gap, out=gap)
            np.multiply(gap, sent, out=gap)
            if to_step != 1.0:
                np.multiply(gap, scale, out=gap)
            np.add(center[part], gap, out=out[part])
            stale[part] = out[part]

        each_block(center.size, body, 2)


def _compensated(
    center: FloatArray, sent: FloatArray, stale: FloatArray, slope: float, scale: float, one: float
) -> None:
    for i in range(center.size):
        gap = (center[i] - stale[i]) * sent[i] * slope
        center[i] = center[i] + (gap + one) * sent[i] * scale
        stale[i] = center[i]


def _adaptive(
    center: FloatArray,
    sent: FloatArray,
    stale: FloatArray,
    squares: FloatArray,
    slope: float,
    scale: float,
    one: float,
    decay: float,
    root_new: float,
    epsilon: float,
) -> None:
    for i in range(center.size):
        root = sent[i] * root_new
        squares[i] = squares[i] * decay + root * root
        gap = (center[i] - stale[i]) * sent[i] * slope / np.sqrt(squares[i] + epsilon)
        center[i] = center[i] + (gap + one) * sent[i] * scale
        stale[i] = center[i]


def _gap_aware(
    center: FloatArray,
    sent: FloatArray,
    stale: FloatArray,
    squares: FloatArray,
    decay: float,
    gradient: float,
    spread: float,
    least: float,
    scale: float,
) -> None:
    for i in range(center.size):
        root = sent[i] * gradient
        squares[i] = squares[i] * decay + root * root
        typical = np.sqrt(squares[i]) * spread + least
        gap = abs(center[i] - stale[i])
        center[i] = center[i] + typical / (gap + typical) * sent[i] * scale
        stale[i] = center[i]


@dataclass(frozen=True)
class DynSGD(Rule):
    """Divides each change by its staleness plus one: ``center += delta / (tau + 1)``.

    ``tau`` is the number of commits that others made since this worker's pull: after one of them
    half of the change counts. A worker alone is plain SGD.

    Reference: Jiang, Cui, Zhang and Yu, 2017, "Heterogeneity-aware Distributed Parameter Servers"
    (SIGMOD).
    """

    name: ClassVar[str] = "dynsgd"
    default_window: ClassVar[int] = AUTO_WINDOW

    def share_of(self, commit: Commit) -> float:
        return 1.0 / (max(commit.staleness, 0) + 1)


@dataclass(frozen=True)
class StalenessAware(Rule):
    """Divides the learning rate by the staleness: ``center += delta / max(tau, 1)``.

    Reference: Zhang, Gupta, Lian and Liu, 2015, "Staleness-aware Async-SGD for Distributed Deep
    Learning", arXiv:1511.05950.
    """

    name: ClassVar[str] = "staleness_aware"
    default_window: ClassVar[int] = 5

    def share_of(self, commit: Commit) -> float:
        return 1.0 / max(commit.staleness, 1)


@dataclass(frozen=True)
class Experimental(BackupRule):
    """dist-keras' Experimental: a coordinate that moved away since the pull counts less.

    ::

        center += (delta / window) / (1 + (center - stale)² / learning_rate)

    ``stale`` is the center at the worker's last pull, kept on the server, one copy per worker
    (memory: workers + 1 times the model). A window of k batches moves the center by a k-th of what
    was trained, hence the default of 1 (dist-keras: 5).

    Args:
        learning_rate: The constant in the equation; None takes the worker's current one.

    Reference: Hermans, 2016-2017, dist-keras (``ExperimentalParameterServer``), CERN IT-DB.
    """

    learning_rate: float | None = option(0.1, POSITIVE_OR_NONE)

    name: ClassVar[str] = "experimental"
    default_window: ClassVar[int] = 1
    elementwise: ClassVar[bool] = True

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One damped step; the worker's backup becomes the new center."""
        rate = self.learning_rate or learning_rate_of(self.name, commit)
        stale = self.backup(state, commit.worker)
        # (delta / k) / (1 + d² / rate) as delta · (rate / k) / (rate + d²): an operation less
        constant = np.float32(rate)
        share = np.float32(rate / max(commit.batches, 1))
        if run_compiled(_damped, center, out, (delta, stale), (constant, share)):
            return

        def body(part: slice, damping: FloatArray, step: FloatArray) -> None:
            np.subtract(center[part], stale[part], out=damping)
            np.multiply(damping, damping, out=damping)
            np.add(damping, constant, out=damping)
            np.multiply(delta[part], share, out=step)
            np.divide(step, damping, out=step)
            np.add(center[part], step, out=out[part])
            stale[part] = out[part]

        each_block(center.size, body, 2)


def _damped(
    center: FloatArray, delta: FloatArray, stale: FloatArray, constant: float, share: float
) -> None:
    for i in range(center.size):
        gap = center[i] - stale[i]
        center[i] = center[i] + delta[i] * share / (gap * gap + constant)
        stale[i] = center[i]
