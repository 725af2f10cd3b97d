"""Local steps, then the mean of the weights: LocalSGD, adaptive LocalSGD, Downpour, DiLoCo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, OuterExchange, WeightsExchange
from sparkdl.errors import ConfigError
from sparkdl.optimizers.flat import FlatSGD
from sparkdl.options import require_fraction, require_positive, require_whole
from sparkdl.weights import FloatArray, Layout


class MeanWeightsExchange(WeightsExchange):
    """The center gets the mean change ``D = Σ n_i (x_i − x̃) / Σ n_i``; every rank, the center.

    Averaged statistics replace each rank's own. If no rank had rows nothing changes.
    """

    def after_window(
        self,
        weights: FloatArray,
        rows: int,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> int | None:
        trained = self.layout.trained_size
        if rows:
            np.subtract(weights[:trained], self.center[:trained], out=self.trained)
            np.copyto(self.buffer[trained:], weights[trained:])
        if self._combine(rows):
            self._advance(self.center[:trained], self.trained)
            np.copyto(self.center[trained:], self.buffer[trained:])
        np.copyto(weights, self.center)
        return None

    def _combine(self, rows: int) -> bool:
        """Replaces this rank's change in the buffer by the ranks' joined one."""
        return self.average(self.whole, rows)

    def _advance(self, center: FloatArray, change: FloatArray) -> None:
        """Applies the joined change to the center's trained section."""
        center += change


@dataclass(frozen=True)
class LocalSGD(ExchangeRule):
    """Every window the weights become ``x = s − Σ n_i (s − x_i) / Σ n_i``, ``s`` the last ones.

    With one batch between exchanges and plain SGD this is synchronous SGD.

    References:
        Stich, Local SGD converges fast and communicates little, 2018.
    """

    name: ClassVar[str] = "local_sgd"
    exchanges = "weights"
    takes_halves: ClassVar[bool] = True
    default_window: ClassVar[int] = 8

    def open(self, communicator: Communicator, layout: Layout) -> WeightsExchange:
        return MeanWeightsExchange(communicator, layout)


@dataclass(frozen=True)
class AdaptiveLocalSGD(ExchangeRule):
    """LocalSGD whose window follows the loss: ``k = clip(⌈√(η₀ L k₀ / (η L₀))⌉, 1, limit)``.

    ``L`` is the row-weighted mean loss of all ranks since the last exchange, ``η`` the learning
    rate; ``L₀``, ``η₀`` their values at the end of the warm-up.

    Args:
        first_window: ``k₀``; the first window after the warm-up is its square root.
        warm_up: Exchanges with a window of 1 at the start.
        limit: The longest window.

    References:
        Wang and Joshi, Adaptive communication strategies for local-update SGD, 2019.
    """

    first_window: int = 16
    warm_up: int = 1
    limit: int = 16

    name: ClassVar[str] = "adaptive_local_sgd"
    exchanges = "weights"
    takes_halves: ClassVar[bool] = True
    own_window: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole(self.name, "first_window", self.first_window, 1)
        require_whole(self.name, "warm_up", self.warm_up, 1)
        require_whole(self.name, "limit", self.limit, 1)

    def open(self, communicator: Communicator, layout: Layout) -> AdaptiveExchange:
        return AdaptiveExchange(communicator, layout, self)


class AdaptiveExchange(MeanWeightsExchange):
    """See :class:`AdaptiveLocalSGD`."""

    adapts = True

    def __init__(self, communicator: Communicator, layout: Layout, rule: AdaptiveLocalSGD) -> None:
        super().__init__(communicator, layout, extras=2)
        self._rule = rule
        self._exchanges = 0
        self._window = 1
        self._first: tuple[float, float] | None = None

    def after_window(
        self,
        weights: FloatArray,
        rows: int,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> int | None:
        if rows and (loss is None or learning_rate is None):
            raise ConfigError(
                f"rule {self._rule.name!r} cannot choose a window",
                expected="the loss and the learning rate with each exchange",
                received=f"loss={loss!r}, learning_rate={learning_rate!r}",
            )
        self.extras[:] = (loss or 0.0, learning_rate or 0.0)
        super().after_window(weights, rows)
        if not self.whole[-1] > 0.0:
            return self._window
        mean_loss, mean_rate = (float(v) for v in self.extras)
        self._exchanges += 1
        if self._exchanges < self._rule.warm_up:
            return self._window
        if self._first is None:
            self._first = (mean_loss, mean_rate)
        self._window = adaptive_window(
            mean_loss, self._first[0], mean_rate, self._first[1],
            self._rule.first_window, self._rule.limit,
        )  # fmt: skip
        return self._window


def adaptive_window(
    loss: float,
    first_loss: float,
    learning_rate: float,
    first_learning_rate: float,
    first_window: int = 1,
    limit: int = 16,
) -> int:
    """Steps to the next exchange, ``clip(⌈√(η₀ L k₀ / (η L₀))⌉, 1, limit)``; 1 where undefined.

    >>> adaptive_window(0.5, 2.0, 0.01, 0.1, 4)
    4
    """
    if not (first_loss > 0 and learning_rate > 0 and math.isfinite(loss)):
        return 1
    ratio = first_learning_rate * max(loss, 0.0) / (learning_rate * first_loss)
    return min(limit, max(1, math.ceil(math.sqrt(ratio * first_window))))


@dataclass(frozen=True)
class DownpourExchangeRule(ExchangeRule):
    """Synchronous Downpour: ``x̃ += Σ A_i (/p)``; ``x_i = x̃``; ``A_i = x_i − x̃`` of the window.

    With the mean, row-weighted, it is :class:`LocalSGD`.

    Args:
        mean: False adds the ranks' changes instead: it diverges as ranks are added.

    References:
        Dean et al., Large scale distributed deep networks, 2012; Platoon (its synchronous form).
    """

    mean: bool = True

    name: ClassVar[str] = "downpour"
    exchanges = "weights"
    takes_halves: ClassVar[bool] = True
    default_window: ClassVar[int] = 8

    def open(self, communicator: Communicator, layout: Layout) -> WeightsExchange:
        kind = MeanWeightsExchange if self.mean else SumWeightsExchange
        return kind(communicator, layout)


class SumWeightsExchange(MeanWeightsExchange):
    """Changes are added, not averaged; see :class:`DownpourExchangeRule`."""

    def _combine(self, rows: int) -> bool:
        return self.add(rows)


@dataclass(frozen=True)
class DiLoCoExchangeRule(ExchangeRule):
    """Many local steps, then an outer Nesterov step along the mean change ``D``::

        m  = momentum · m + D
        x̃ += learning_rate · (D + momentum · m);   x_i = x̃

    Momentum 0 and learning rate 1 is :class:`LocalSGD`.

    Args:
        learning_rate: The outer learning rate.
        momentum: The outer momentum, in [0, 1).

    References:
        Douillard et al., DiLoCo: distributed low-communication training of language models, 2023.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    name: ClassVar[str] = "diloco"
    exchanges = "weights"
    takes_halves: ClassVar[bool] = True
    default_window: ClassVar[int] = 500

    def __post_init__(self) -> None:
        require_positive(self.name, "learning_rate", self.learning_rate)
        require_fraction(self.name, "momentum", self.momentum)

    def open(self, communicator: Communicator, layout: Layout) -> DiLoCoExchange:
        return DiLoCoExchange(communicator, layout, self)


class DiLoCoExchange(OuterExchange, MeanWeightsExchange):
    """See :class:`DiLoCoExchangeRule`."""

    def __init__(
        self, communicator: Communicator, layout: Layout, rule: DiLoCoExchangeRule
    ) -> None:
        super().__init__(communicator, layout)
        self._outer = FlatSGD(rule.learning_rate, rule.momentum, nesterov=True)
        self._rate = rule.learning_rate
        self._outer_state = self._outer.init(np.empty(layout.trained_size, np.float32))

    def _advance(self, center: FloatArray, change: FloatArray) -> None:
        # The change lowers the loss, while the optimizer steps against a gradient: hence the minus.
        self._outer.step(center, change, self._outer_state, -self._rate, center)
