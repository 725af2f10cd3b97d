"""DiLoCo: many local steps, then an outer Nesterov step on the mean change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.optimizers.blocks import add_scaled
from sparkdl.optimizers.flat import take_nesterov_step
from sparkdl.rules.rule import Commit, Rule, State
from sparkdl.settings.values import option, require_fraction, require_positive, whole_from
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

    learning_rate: float = option(0.7, require_positive)
    momentum: float = option(0.9, require_fraction)

    name: ClassVar[str] = "diloco"
    blocking: ClassVar[bool] = True
    default_window: ClassVar[int] = 500
    elementwise: ClassVar[bool] = True

    def init(self, center: FloatArray) -> State:
        """The outer momentum (times ``learning_rate · momentum``), from 0, if there is one."""
        return {"decayed_momentum": np.zeros_like(center)} if self.momentum else {}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One outer step along ``delta``, the row-weighted mean of the round."""
        if self.momentum:
            decayed: FloatArray = state["decayed_momentum"]
            take_nesterov_step(center, delta, decayed, self.learning_rate, self.momentum, out)
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

    learning_rate: float = option(0.7, require_positive)
    momentum: float = option(0.9, require_fraction)
    period: int | None = option(None, whole_from(1, or_none=True))

    name: ClassVar[str] = "async_diloco"
    default_window: ClassVar[int] = AUTO_WINDOW
    elementwise: ClassVar[bool] = True

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
        decayed, rate = state["decayed_momentum"], self.learning_rate / period
        if period > 1:
            np.add(total, delta, out=total)
            take_nesterov_step(center, delta, decayed, rate, self.momentum, out, total=total)
            total.fill(0.0)
        else:
            take_nesterov_step(center, delta, decayed, rate, self.momentum, out)
