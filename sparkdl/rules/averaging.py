"""The mean of the workers' weights once an epoch; and two rules that share nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparkdl.errors import ConfigError
from sparkdl.rules.rule import Peer, Rule
from sparkdl.weights import FloatArray


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
