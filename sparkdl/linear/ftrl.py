"""``FtrlTable``: weights of a linear model by id, each with its state of FTRL-Proximal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.settings.values import UserSettings, ValueKind, require_not_negative, setting
from sparkdl.settings.values import require_positive as _require_positive
from sparkdl.tables.hashing import Ids
from sparkdl.tables.index import RowIndex, Slots, grown

Numbers = npt.NDArray[np.float64]


def _above_zero(name: str, value: float) -> float:
    _require_positive("ftrl", name, value)
    return float(value)


def _not_negative(name: str, value: float) -> float:
    require_not_negative("ftrl", name, value)
    return float(value)


ABOVE_ZERO = ValueKind(_above_zero, float)
NOT_NEGATIVE = ValueKind(_not_negative, float)


@dataclass(frozen=True)
class Ftrl(UserSettings):
    """FTRL-Proximal, one step of a coordinate with the gradient g of the loss::

        σ = (√(n + g²) - √n) / alpha;  z += g - σ w;  n += g²
        w = 0                                            where |z| <= lambda1
        w = -(z - sign(z) lambda1) / ((beta + √n) / alpha + lambda2)     elsewhere

    z, n and w begin at 0. All are float64, so that the order in which gradients are summed shows in
    the last digits alone; :class:`sparkdl.tables.rules.FtrlRows` has the same step in float32, with
    Keras' constants (``lambda2`` is twice its l2, and its n begins at 0.1).

    Args:
        lambda1: Strength of L1: a weight is exactly 0 until the sum of its gradients passes it.
        lambda2: Strength of L2.
        alpha: The learning rate: no step changes a weight by much more than this.
        beta: Slows down the first steps of a weight, until √n has passed it.

    Raises:
        ConfigError: A value that is not of its kind.

    References:
        McMahan et al., 2013: Ad Click Prediction: a View from the Trenches, algorithm 1.
    """

    lambda1: float = setting(0.0, NOT_NEGATIVE)
    lambda2: float = setting(0.0, NOT_NEGATIVE)
    alpha: float = setting(0.1, ABOVE_ZERO)
    beta: float = setting(1.0, NOT_NEGATIVE)

    def weights(self, z: Numbers, n: Numbers) -> Numbers:
        """The weights of coordinates, from their state."""
        pull = np.clip(z, -self.lambda1, self.lambda1)
        pull -= z
        step = np.sqrt(n)
        step += self.beta
        step /= self.alpha
        step += self.lambda2
        # Without a gradient, n and the divisor may be 0; z, and so the numerator, is 0 then.
        return np.divide(pull, step, out=pull, where=pull != 0)

    def step(self, z: Numbers, n: Numbers, w: Numbers, gradients: Numbers) -> None:
        """One step of coordinates.

        Args:
            z: It is changed, as ``n`` is.
            n: See ``z``.
            w: What :meth:`weights` gives for them.
            gradients: Gradients of the same shape.
        """
        more = n + gradients * gradients
        moved = np.sqrt(more)
        moved -= np.sqrt(n)
        moved /= self.alpha
        moved *= w
        z += gradients
        z -= moved
        n[:] = more


class FtrlTable:
    """State of the coordinates that one rank owns: 16 bytes each, beside 15 to 25 of the index.

    Not thread-safe.
    """

    def __init__(self, rule: Ftrl) -> None:
        self.rule = rule
        self._index = RowIndex()
        self._z, self._n = np.zeros(1024), np.zeros(1024)

    def __len__(self) -> int:
        return len(self._index)

    def slots(self, ids: Ids) -> Slots:
        """The place of each id; one that is new begins with zeros."""
        slots = self._index.add(ids)
        if self._index.end > len(self._z):
            size = grown(len(self._z), self._index.end)
            self._z.resize(size, refcheck=False)
            self._n.resize(size, refcheck=False)
        return slots

    def weights(self, slots: Slots) -> Numbers:
        """The weights at some places."""
        return self.rule.weights(self._z.take(slots), self._n.take(slots))

    def step(self, slots: Slots, weights: Numbers, gradients: Numbers) -> None:
        """One step of the weights at some places, each of them once."""
        z, n = self._z.take(slots), self._n.take(slots)
        self.rule.step(z, n, weights, gradients)
        self._z[slots], self._n[slots] = z, n

    def export(self) -> tuple[Ids, Numbers]:
        """The ids whose weight is not 0, ascending, and these weights."""
        live = self._index.live()
        ids, weights = self._index.ids(live), self.weights(live)
        kept = np.flatnonzero(weights)
        kept = kept[np.argsort(ids[kept])]
        return ids[kept], weights[kept]
