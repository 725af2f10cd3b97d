"""DiLoCo: many local steps, then an outer Nesterov step on the mean change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.optimizers.blocks import add_scaled, each_block
from sparkdl.optimizers.compiled import run_compiled
from sparkdl.options import require_fraction, require_positive, require_whole
from sparkdl.ps.rules.rule import Commit, Rule, State
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class DiLoCo(Rule):
    """Synchronous DiLoCo: the center takes a Nesterov step along the workers' mean change.

    With ``D = mean(local_i - center)``, which points downhill already::

        m      = momentum · m + D
        center += learning_rate · (D + momentum · m)

    Momentum 0 and learning rate 1 is plain averaging.

    Args:
        learning_rate: The outer learning rate.
        momentum: The outer momentum, in [0, 1).

    Reference: Douillard et al., 2023, "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv:2311.08105.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    name: ClassVar[str] = "diloco"
    blocking: ClassVar[bool] = True
    default_window: ClassVar[int] = 500

    def __post_init__(self) -> None:
        require_positive(self.name, "learning_rate", self.learning_rate)
        require_fraction(self.name, "momentum", self.momentum)

    def init(self, center: FloatArray) -> State:
        """The outer momentum (times ``learning_rate · momentum``), from 0."""
        return {"decayed_momentum": np.zeros_like(center)}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One outer step along ``delta``, the row-weighted mean of the round."""
        if self.momentum:
            _nesterov(center, delta, delta, 1.0, state["decayed_momentum"], self, out)
        else:
            add_scaled(center, delta, self.learning_rate, out)


@dataclass(frozen=True)
class AsyncDiLoCo(Rule):
    """Asynchronous DiLoCo with delayed Nesterov: every commit counts, momentum moves every N.

    ::

        center += learning_rate · delta / N;   s += delta          (each commit)
        m = momentum · m + s / N;   center += learning_rate · momentum · m;   s = 0   (every N-th)

    N commits make one step of synchronous DiLoCo. A Nesterov step at each commit would apply the
    momentum N times as often, and overshoot. One worker alone is :class:`DiLoCo`.

    A worker goes on from a center that has its own change, but not yet the others'. To learn it
    needs some tens of exchanges, so the default window follows the length of the epoch. On a slow
    network set ``frequency`` to up to a sixteenth of an epoch (the paper: 500 batches).

    Args:
        learning_rate: The outer learning rate.
        momentum: The outer momentum, in [0, 1).
        period: N; None takes the number of workers.

    References: Douillard et al., 2023, arXiv:2311.08105; Liu et al., 2024, "Asynchronous Local-SGD
    Training for Language Modeling", arXiv:2401.09135 (delayed Nesterov, c = 0).
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    period: int | None = None

    name: ClassVar[str] = "async_diloco"
    default_window: ClassVar[int] = AUTO_WINDOW

    def __post_init__(self) -> None:
        require_positive(self.name, "learning_rate", self.learning_rate)
        require_fraction(self.name, "momentum", self.momentum)
        require_whole(self.name, "period", self.period, 1, or_none=True)

    def init(self, center: FloatArray) -> State:
        """The outer momentum and the sum of the changes since it last moved, from 0."""
        return {"decayed_momentum": np.zeros_like(center), "sum": np.zeros_like(center), "count": 0}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One commit; every ``period``-th moves the momentum and applies it."""
        period = self.period or max(commit.num_workers, 1)
        state["count"] += 1
        if not self.momentum:
            add_scaled(center, delta, self.learning_rate / period, out)
            return
        total: FloatArray = state["sum"]
        if state["count"] < period:
            np.add(total, delta, out=total)
            add_scaled(center, delta, self.learning_rate / period, out)
            return
        state["count"] = 0
        if period > 1:
            np.add(total, delta, out=total)
            _nesterov(center, delta, total, 1.0 / period, state["decayed_momentum"], self, out)
            total.fill(0.0)
        else:
            _nesterov(center, delta, delta, 1.0, state["decayed_momentum"], self, out)


def _nesterov(
    center: FloatArray,
    delta: FloatArray,
    total: FloatArray,
    scale: float,
    decayed: FloatArray,
    rule: DiLoCo | AsyncDiLoCo,
    out: FloatArray,
) -> None:
    """``m = mu m + scale · total; out = center + lr · (scale · delta + mu m)``, block by block.

    ``decayed`` holds ``lr · mu · m``, which takes one pass less than ``m`` itself.
    """
    momentum, factor = np.float32(rule.momentum), np.float32(scale * rule.learning_rate)
    alone, scalars = total is delta, (momentum, factor)
    if alone and run_compiled(_nesterov_loop, center, out, (delta, decayed), scalars):
        return

    def body(part: slice, step: FloatArray, summed: FloatArray) -> None:
        m = decayed[part]
        np.multiply(delta[part], factor, out=step)
        if total is delta:
            np.add(m, step, out=m)
        else:
            np.multiply(total[part], factor, out=summed)
            np.add(m, summed, out=m)
        np.multiply(m, momentum, out=m)
        np.add(step, m, out=step)
        np.add(center[part], step, out=out[part])

    each_block(center.size, body, 2)


def _nesterov_loop(
    center: FloatArray, delta: FloatArray, decayed: FloatArray, momentum: float, factor: float
) -> None:
    for i in range(center.size):
        step = delta[i] * factor
        decayed[i] = (decayed[i] + step) * momentum
        center[i] = center[i] + (step + decayed[i])
