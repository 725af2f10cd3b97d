"""Synchronous elastic averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, WeightsExchange
from sparkdl.rules.elastic import pull_together, require_stable
from sparkdl.settings.values import require_positive
from sparkdl.weights import FloatArray, Layout


@dataclass(frozen=True)
class EASGD(ExchangeRule):
    """``x_i −= α (x_i − x̃)``; ``x̃ += α Σ (x_i − x̃)``, both from the old values.

    The center gains what the ranks lose: ``Σ x_i + x̃`` does not change. The ranks keep weights of
    their own; the run's model is the center. A rank without rows keeps its weights and does not
    move the center. Statistics are averaged on all ranks.

    Args:
        alpha: Share of the gap that is closed at each exchange; None: ``1/p``. With ``α p`` beyond
            1 the center would move further than its ranks are away, and diverge.

    References:
        Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, 2015; Platoon.
    """

    alpha: float | None = None

    name: ClassVar[str] = "easgd"
    exchanges = "weights"
    default_window: ClassVar[int] = 8

    def __post_init__(self) -> None:
        require_positive(self.name, "alpha", self.alpha, or_none=True)

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        if self.alpha is not None:
            require_stable(self.name, self.alpha, num_workers)
        return self

    def open(self, communicator: Communicator, layout: Layout) -> EASGDExchange:
        self.bind(communicator.size)
        rate = 1.0 / communicator.size if self.alpha is None else self.alpha
        return EASGDExchange(communicator, layout, rate)


class EASGDExchange(WeightsExchange):
    """See :class:`EASGD`."""

    apart = True

    def __init__(self, communicator: Communicator, layout: Layout, rate: float) -> None:
        super().__init__(communicator, layout)
        self._rate = rate

    def after_window(
        self,
        weights: FloatArray,
        rows: int,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> int | None:
        trained = self.layout.trained_size
        np.copyto(self.buffer[trained:], weights[trained:])
        if not self.average(self.tail, rows):
            return None
        for flat in (weights, self.center):
            np.copyto(flat[trained:], self.buffer[trained:])
        pull, local, center = self.trained, weights[:trained], self.center[:trained]
        if rows:
            pull_together(local, center, self._rate, pull)
        else:
            pull.fill(0.0)
        self.all_reduce(pull, "sum")
        center += pull
        return None
