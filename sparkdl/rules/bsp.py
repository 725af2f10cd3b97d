"""Rules by who waits for whom: BSP, SSP, the mean of an epoch, and workers that share nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.errors import ConfigError
from sparkdl.rules.rule import PAYLOAD, Commit, Peer, Rule, State
from sparkdl.settings.values import one_word_of, option, require_whole
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class BSP(Rule):
    """Waits for all workers, then applies the row-weighted mean of what they sent.

    The server hands ``update`` the mean ``Σ rows_i · delta_i / Σ rows_i`` of the round.

    With payload ``'gradient'`` the reply is that mean gradient (``out = mean``), which every worker
    applies with its own optimizer: p workers with batch b are one process with batch p·b, exactly.
    With payload ``'delta'`` it is the new center, ``out = center + mean``.

    Args:
        payload: ``'gradient'`` (exact, an exchange per batch) or ``'delta'`` (local SGD).

    References: Valiant, 1990, "A Bridging Model for Parallel Computation" (CACM 33); for
    ``'delta'``: Stich, 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.
    """

    payload: Literal["delta", "gradient"] = option("gradient", PAYLOAD)

    name: ClassVar[str] = "bsp"
    blocking: ClassVar[bool] = True
    default_window: ClassVar[int] = 1
    elementwise: ClassVar[bool] = True

    @property
    def replies_mean(self) -> bool:
        """Unless a subclass has an ``update`` of its own."""
        return type(self).update is BSP.update and self.payload == "gradient"

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """Writes the reply of the round: the mean gradient, or the center plus the mean delta."""
        if self.payload == "gradient":
            np.copyto(out, delta)
        else:
            np.add(center, delta, out=out)


@dataclass(frozen=True)
class Averaging(Rule):
    """Every worker trains an epoch from the center; the center becomes their mean.

    ``center += mean(local_i - center)``, which is ``center = mean(local_i)``, weighted by rows.
    The same as ``BSP(payload='delta')`` with one exchange per epoch.

    Reference: Zinkevich, Weimer, Li and Smola, 2010, "Parallelized Stochastic Gradient Descent"
    (NIPS), repeated each epoch as in McDonald, Hall and Mann, 2010. (dist-keras' averaging is
    wrong from the second epoch on.)
    """

    name: ClassVar[str] = "averaging"
    blocking: ClassVar[bool] = True
    default_window: ClassVar[int] = 0


@dataclass(frozen=True)
class SingleWorker(Rule):
    """One worker trains alone, and sends its change of the weights once an epoch.

    ``center += delta``.

    What dist-keras calls the single trainer; the baseline that the other rules are held to.
    """

    name: ClassVar[str] = "single"
    default_window: ClassVar[int] = 0

    def bind(self, num_workers: int) -> Rule:
        if num_workers != 1:
            raise ConfigError(
                f"rule {self.name!r} trains one model on one worker",
                expected="num_workers=1",
                received=f"num_workers={num_workers}",
                hint="choose rule='averaging' for one model from several workers, "
                "or 'ensemble' for several models",
            )
        return self


@dataclass(frozen=True)
class Ensemble(Rule):
    """Every worker trains a model of its own; nothing is ever exchanged.

    The center keeps the initial weights. The result is one model per rank (``independent`` says
    so): the caller collects them from the ranks, and averages their predictions. Workers should
    differ in their seeds or their data, else the models are all the same.

    Reference: Hansen and Salamon, 1990, "Neural Network Ensembles" (IEEE TPAMI 12).
    """

    name: ClassVar[str] = "ensemble"
    default_window: ClassVar[int] = 0
    independent: ClassVar[bool] = True

    def exchange(self, local: FloatArray, base: FloatArray, peer: Peer) -> None:
        """Does nothing: ``local`` stays what this worker trained."""


@dataclass(frozen=True)
class SSP(Rule):
    """Bounded staleness: a worker waits while it is more than ``staleness`` commits ahead.

    A worker with ``c`` commits gets its reply once the slowest has at least ``c - staleness``, and
    so sees every update of clock ``c - staleness - 1`` and before. A ``staleness`` of 0 is BSP;
    with a negative one nobody waits (ASP). The server copies the center for the reply *after* the
    wait.

    ::

        center += delta / workers      (scale 'mean')
        center += delta                (scale 'sum')

    With ``'mean'`` one round of all workers adds the mean of their changes, so that staleness 0
    gives BSP's weights; the paper itself adds (``'sum'``), with a learning rate that is divided.

    Args:
        staleness: Commits that a worker may be ahead of the slowest.
        scale: ``'mean'`` or ``'sum'``.

    References: Ho et al., 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server" (NIPS); Jiang et al., 2017, "Angel" (its ``staleness`` counts alike).
    """

    staleness: int = option(3, require_whole)
    scale: Literal["mean", "sum"] = option("mean", one_word_of("mean", "sum"))

    name: ClassVar[str] = "ssp"
    default_window: ClassVar[int] = AUTO_WINDOW

    def share_of(self, commit: Commit) -> float:
        return 1.0 / max(commit.num_workers, 1) if self.scale == "mean" else 1.0

    def may_continue(self, clock: int, slowest_clock: int) -> bool:
        return self.staleness < 0 or clock - slowest_clock <= self.staleness
