"""PowerSGD: the gradient of a matrix is sent as two thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, GradientExchange
from sparkdl.settings.values import require_whole
from sparkdl.weights import FloatArray, Layout


@dataclass(frozen=True)
class PowerSGD(ExchangeRule):
    """Low-rank gradients with error feedback.

    Per matrix, with ``M = G + e``: ``P = mean(M Q)``, orthogonalized; ``Q = mean(Mᵀ P)``;
    ``Ĝ = P Qᵀ``; ``e = M − Ĝ``; means are row-weighted. Variables of more than two dimensions are
    matrices of their last dimension; where the factors would not be smaller, and for vectors, the
    plain mean is taken. A rank without rows keeps its error for later.

    Each rank computes the small matrix products itself, so the ranks' weights are equal to the bit
    only if they have equal hardware and the same NumPy.

    Args:
        rank: Columns of the factors.
        seed: Of the first ``Q``, equal on all ranks.

    References:
        Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression, 2019.
    """

    rank: int = 1
    seed: int = 0

    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        require_whole(self.name, "rank", self.rank, 1)
        require_whole(self.name, "seed", self.seed, 0)

    def open(self, communicator: Communicator, layout: Layout) -> PowerSGDExchange:
        return PowerSGDExchange(communicator, layout, self)


class PowerSGDExchange(GradientExchange):
    """See :class:`PowerSGD`."""

    def __init__(self, communicator: Communicator, layout: Layout, rule: PowerSGD) -> None:
        super().__init__(communicator, layout)
        random = np.random.default_rng(rule.seed)
        self._places: list[tuple[slice, tuple[int, int]]] = []
        self._factors: list[FloatArray] = []
        self._errors: list[FloatArray] = []
        plain = np.ones(self.whole.size, bool)
        for slot in layout.slots:
            if len(slot.shape) < 2 or slot.offset >= layout.trained_size or not slot.size:
                continue
            columns = slot.shape[-1]
            rows = slot.size // columns
            width = min(rule.rank, rows, columns)
            if width * (rows + columns) >= slot.size and width < min(rows, columns):
                continue
            place = slice(slot.offset, slot.offset + slot.size)
            self._places.append((place, (rows, columns)))
            self._factors.append(random.standard_normal((columns, width)).astype(np.float32))
            self._errors.append(np.zeros((rows, columns), np.float32))
            plain[place] = False
        self._plain = np.flatnonzero(plain)

    def reduce(self, rows: int) -> bool:
        gradients = [self.whole[place].reshape(shape) for place, shape in self._places]
        # with rows the error becomes M = G + e at once, without another copy of the model
        matrices: list[FloatArray] = [
            np.add(error, gradient, out=error) if rows else error
            for gradient, error in zip(gradients, self._errors, strict=True)
        ]
        lefts = [m @ q for m, q in zip(matrices, self._factors, strict=True)]
        self.whole[-1] = float(rows > 0)
        *means, plain = self._mean([*lefts, self.whole[self._plain]], rows)
        self.whole[self._plain] = plain
        if not self.whole[-1] > 0.0:
            return False
        lefts = [np.linalg.qr(left)[0].astype(np.float32) for left in means]
        rights = self._mean([m.T @ p for m, p in zip(matrices, lefts, strict=True)], rows)
        for i, gradient in enumerate(gradients):
            # into the buffer, of which this is a view; with one column that is five times faster
            product = np.multiply if lefts[i].shape[1] == 1 else np.matmul
            product(lefts[i], rights[i].T, out=gradient)
            if rows:
                np.subtract(matrices[i], gradient, out=self._errors[i])
        self._factors = rights
        return True

    def _mean(self, arrays: list[FloatArray], rows: int) -> list[FloatArray]:
        """The ranks' means of several arrays, sent as one."""
        if not arrays:
            return []
        joined = np.concatenate([a.reshape(-1) for a in arrays])
        self.all_reduce(joined, "weighted", rows)
        ends = np.cumsum([a.size for a in arrays])[:-1]
        parts = np.split(joined, ends.tolist())
        return [p.reshape(a.shape) for p, a in zip(parts, arrays, strict=True)]
