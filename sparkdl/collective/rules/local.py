"""Local steps, then a step of the center along the mean change: LocalSGD, adaptive, DiLoCo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, OuterExchange
from sparkdl.errors import ConfigError
from sparkdl.rules.diloco import DiLoCo
from sparkdl.rules.rule import Commit, Rule
from sparkdl.settings.values import require_whole
from sparkdl.weights import FloatArray, Layout


class RoundRule(ExchangeRule, Rule):
    """A rule of :mod:`sparkdl.rules` whose rounds are an all-reduce of the ranks.

    Every window the ranks' mean change ``D = Σ n_i (x_i − x̃) / Σ n_i`` takes the place of the mean
    that a server makes of a round: the rule's ``update`` moves the center with it on all ranks
    alike, and each rank goes on from there. So a rule that waits for all workers and takes changes
    is written once::

        class DiLoCoExchangeRule(DiLoCo, RoundRule): ...

    What ``update`` learns of a round beside ``D`` is equal on all ranks: how many they are, and how
    many rounds there were; batches and rows count as 1, and there is no learning rate.
    """

    exchanges = "weights"
    takes_halves: ClassVar[bool] = True
    blocking: ClassVar[bool] = True
    default_window: ClassVar[int] = 8

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        return self

    def open(self, communicator: Communicator, layout: Layout) -> RoundExchange:
        return RoundExchange(communicator, layout, self)

    def config(self) -> dict[str, Any]:
        return ExchangeRule.config(self)


class RoundExchange(OuterExchange):
    """See :class:`RoundRule`. Averaged statistics replace each rank's own.

    If no rank had rows nothing changes.
    """

    def __init__(
        self, communicator: Communicator, layout: Layout, rule: Rule, extras: int = 0
    ) -> None:
        super().__init__(communicator, layout, rule, extras)
        self._rounds = 0

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
        if self.average(self.whole, rows):
            center, number = self.center[:trained], self._rounds
            commit = Commit(0, self.communicator.size, number, number, batches=1, rows=1)
            self.outer.update(center, self.trained, self.outer_state, commit, center)
            np.copyto(self.center[trained:], self.buffer[trained:])
            self._rounds += 1
        np.copyto(weights, self.center)
        return None


@dataclass(frozen=True)
class LocalSGD(RoundRule):
    """Every window the weights become ``x = s − Σ n_i (s − x_i) / Σ n_i``, ``s`` the last ones.

    With one batch between exchanges and plain SGD this is synchronous SGD.

    References:
        Stich, Local SGD converges fast and communicates little, 2018.
    """

    name: ClassVar[str] = "local_sgd"


@dataclass(frozen=True)
class DiLoCoExchangeRule(DiLoCo, RoundRule):
    """:class:`sparkdl.rules.DiLoCo` without a server."""


@dataclass(frozen=True)
class AdaptiveLocalSGD(RoundRule):
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
    default_window: ClassVar[int] = 1
    own_window: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole(self.name, "first_window", self.first_window, 1)
        require_whole(self.name, "warm_up", self.warm_up, 1)
        require_whole(self.name, "limit", self.limit, 1)

    def open(self, communicator: Communicator, layout: Layout) -> AdaptiveExchange:
        return AdaptiveExchange(communicator, layout, self)


class AdaptiveExchange(RoundExchange):
    """See :class:`AdaptiveLocalSGD`."""

    adapts = True

    def __init__(self, communicator: Communicator, layout: Layout, rule: AdaptiveLocalSGD) -> None:
        super().__init__(communicator, layout, rule, extras=2)
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
