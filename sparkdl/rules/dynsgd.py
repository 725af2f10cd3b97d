"""Rules that give a stale commit less weight: DynSGD, staleness-aware, and Experimental."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.optimizers.blocks import each_block
from sparkdl.optimizers.compiled import run_compiled
from sparkdl.rules.compensated import BackupRule
from sparkdl.rules.rule import Commit, Rule, State, learning_rate_of
from sparkdl.settings.values import require_positive
from sparkdl.weights import FloatArray


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

    learning_rate: float | None = 0.1

    name: ClassVar[str] = "experimental"
    default_window: ClassVar[int] = 1
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self.name, "learning_rate", self.learning_rate, or_none=True)

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
