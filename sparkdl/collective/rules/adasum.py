"""Adasum: gradients are added where they are orthogonal, and averaged where they are parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, GradientExchange
from sparkdl.errors import ConfigError
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
                "Adasum cannot pair the ranks",
                expected="a number of ranks that is a power of two",
                received=f"{num_workers} ranks",
                hint="set num_workers to a power of two, or choose rule='mean'",
            )
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
