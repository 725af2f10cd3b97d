"""The mean, the sum, Adasum and PowerSGD: how the gradients of all ranks become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, GradientExchange
from sparkdl.errors import ConfigError
from sparkdl.settings.values import option, whole_from
from sparkdl.weights import FloatArray, Layout


@dataclass(frozen=True)
class Adasum(ExchangeRule):
    """A sum where gradients are orthogonal, a mean where they are parallel.

    Pairwise along a binary tree, per variable:
    ``a ⊕ b = (1 − a·b / 2‖a‖²) a + (1 − a·b / 2‖b‖²) b``. Each of the ``log₂ p`` levels exchanges
    the whole buffer between two ranks. A rank without rows counts as a gradient of 0, which
    changes nothing; rows do not weigh otherwise.

    References:
        Maleki et al., Scaling distributed training with adaptive summation, 2021.
    """

    name: ClassVar[str] = "adasum"

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        if num_workers & (num_workers - 1):
            raise ConfigError(
                "Adasum cannot pair the ranks", expected="a number of ranks that is a power of two",
                received=f"{num_workers} ranks",
                hint="set num_workers to a power of two, or choose rule='mean'",
            )  # fmt: skip
        return self

    def open(self, communicator: Communicator, layout: Layout) -> AdasumExchange:
        self.bind(communicator.size)
        return AdasumExchange(communicator, layout)


class AdasumExchange(GradientExchange):
    """See :class:`Adasum`; one group of two ranks per level of the tree."""

    def __init__(self, communicator: Communicator, layout: Layout) -> None:
        super().__init__(communicator, layout)
        rank, size = communicator.rank, communicator.size
        distances = [1 << level for level in range(size.bit_length() - 1)]
        self._pairs = [communicator.group(sorted((rank, rank ^ d))) for d in distances]

    def reduce(self, rows: int) -> bool:
        if not self.average(self.tail, rows):
            return False
        trained = self.trained
        if not rows:
            trained.fill(0.0)
        for pair in self._pairs:
            self.sent_bytes += trained.nbytes
            first, second = pair.all_gather(trained)
            for slot in self.layout.slots:
                if slot.offset < trained.size:
                    place = slice(slot.offset, slot.offset + slot.size)
                    _add_adaptively(first[place], second[place], trained[place])
        return True

    def close(self) -> None:
        for pair in self._pairs:
            pair.close()


def _add_adaptively(a: FloatArray, b: FloatArray, out: FloatArray) -> None:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot = float(wide_a @ wide_b)
    norm_a, norm_b = float(wide_a @ wide_a), float(wide_b @ wide_b)
    factor_a = 1.0 - dot / (2.0 * norm_a) if norm_a > 0 else 1.0
    factor_b = 1.0 - dot / (2.0 * norm_b) if norm_b > 0 else 1.0
    np.copyto(out, factor_a * wide_a + factor_b * wide_b, casting="same_kind")


@dataclass(frozen=True)
class Mean(ExchangeRule):
    """``g = Σ n_i g_i / Σ n_i`` with ``n_i`` rows on rank ``i``: the global batch's gradient.

    A window of k batches is gradient accumulation: one exchange and one optimizer step for k
    batches, equal to one batch of all their rows.

    References:
        Goyal et al., Accurate, large minibatch SGD, 2017; Sergeev and Del Balso, Horovod, 2018.
    """

    name: ClassVar[str] = "mean"
    exact: ClassVar[bool] = True
    takes_halves: ClassVar[bool] = True

    def open(self, communicator: Communicator, layout: Layout) -> MeanGradientExchange:
        return MeanGradientExchange(communicator, layout)


class MeanGradientExchange(GradientExchange):
    def reduce(self, rows: int) -> bool:
        return self.average(self.whole, rows)


@dataclass(frozen=True)
class Sum(ExchangeRule):
    """``g = Σ g_i``: the mean times the ranks that had rows; the learning rate grows with them.

    Where ranks have different numbers of rows each rank counts alike. Statistics are averaged.

    References:
        Sergeev and Del Balso, Horovod, 2018 (op=Sum).
    """

    name: ClassVar[str] = "sum"
    takes_halves: ClassVar[bool] = True

    def open(self, communicator: Communicator, layout: Layout) -> SumGradientExchange:
        return SumGradientExchange(communicator, layout)


class SumGradientExchange(GradientExchange):
    def reduce(self, rows: int) -> bool:
        if not self.average(self.tail, rows):
            return False
        if not rows:
            self.trained.fill(0.0)
        self.all_reduce(self.trained, "sum")
        return True


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
        seed: Seed of the first ``Q``, equal on all ranks.

    References:
        Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression, 2019.
    """

    rank: int = option(1, whole_from(1))
    seed: int = option(0, whole_from(0))

    name: ClassVar[str] = "powersgd"

    def open(self, communicator: Communicator, layout: Layout) -> PowerSGDExchange:
        return PowerSGDExchange(communicator, layout, self)


class PowerSGDExchange(GradientExchange):
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
        if not arrays:
            return []
        joined = np.concatenate([a.reshape(-1) for a in arrays])
        self.all_reduce(joined, "weighted", rows)
        ends = np.cumsum([a.size for a in arrays])[:-1]
        parts = np.split(joined, ends.tolist())
        return [p.reshape(a.shape) for p, a in zip(parts, arrays, strict=True)]
