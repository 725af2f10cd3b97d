"""Local steps, then an exchange of weights: LocalSGD, DiLoCo, elastic, streaming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.communicator import Communicator, Pending
from sparkdl.collective.rules.exchange_rule import ExchangeRule, OuterExchange, WeightsExchange
from sparkdl.errors import ConfigError
from sparkdl.rules.diloco import DiLoCo
from sparkdl.rules.elastic import pull_together, require_stable
from sparkdl.rules.rule import Commit, Rule
from sparkdl.settings.values import (
    POSITIVE_OR_NONE,
    option,
    require,
    require_fraction,
    require_positive,
    whole_from,
)
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


class RoundExchange(OuterExchange):
    """See :class:`RoundRule`. Averaged statistics replace each rank's own.

    If no rank had rows nothing changes.
    """

    _rounds = 0

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

    first_window: int = option(16, whole_from(1))
    warm_up: int = option(1, whole_from(1))
    limit: int = option(16, whole_from(1))

    name: ClassVar[str] = "adaptive_local_sgd"
    default_window: ClassVar[int] = 1
    own_window: ClassVar[bool] = True

    def open(self, communicator: Communicator, layout: Layout) -> AdaptiveExchange:
        return AdaptiveExchange(communicator, layout, self)


class AdaptiveExchange(RoundExchange):
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

    alpha: float | None = option(None, POSITIVE_OR_NONE)

    name: ClassVar[str] = "easgd"
    exchanges = "weights"
    default_window: ClassVar[int] = 8

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        if self.alpha is not None:
            require_stable(self.name, self.alpha, num_workers)
        return self

    def open(self, communicator: Communicator, layout: Layout) -> EASGDExchange:
        self.bind(communicator.size)
        rate = 1.0 / communicator.size if self.alpha is None else self.alpha
        return EASGDExchange(communicator, layout, rate)


class EASGDExchange(WeightsExchange):
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


@dataclass(frozen=True)
class StreamingDiLoCo(ExchangeRule):
    """DiLoCo with the model cut into fragments, which are exchanged in turn and applied later.

    Every ``period`` windows the ranks begin to average the change ``D`` of the next fragment.
    ``delay`` windows later the fragment's center takes DiLoCo's outer step with it, and the rank
    continues from ``x = α x + (1 − α) x̃``. With delay 0 nothing was trained meanwhile, and
    ``x = x̃``; so one fragment without delay is
    :class:`sparkdl.collective.rules.DiLoCoExchangeRule`.

    Each fragment is exchanged every ``fragments · period`` windows (the paper's ``H`` steps): with
    the defaults and a window of 5 batches H is 100 and τ is 5. Fragments are equal ranges of the
    trained section; the first one has the statistics too.

    Args:
        fragments: Pieces of the model.
        period: Windows from one fragment's start to the next one's.
        delay: Windows from a fragment's start to its use (τ); below ``fragments · period``.
        alpha: Share of the local weights that is kept when a fragment is applied, in [0, 1).
        learning_rate: The outer learning rate.
        momentum: The outer momentum, in [0, 1).

    References:
        Douillard et al., Streaming DiLoCo with overlapping communication, 2025.
    """

    fragments: int = option(4, whole_from(1))
    period: int = option(5, whole_from(1))
    delay: int = option(1, whole_from(0))
    alpha: float = option(0.5, require_fraction)
    learning_rate: float = option(0.7, require_positive)
    momentum: float = option(0.9, require_fraction)

    name: ClassVar[str] = "streaming_diloco"
    exchanges = "weights"
    default_window: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        turn = self.fragments * self.period
        require(
            self.delay < turn, self.name, "delay",
            f"fewer windows than a turn of all fragments ({turn})", self.delay,
        )  # fmt: skip

    def open(self, communicator: Communicator, layout: Layout) -> StreamingExchange:
        return StreamingExchange(communicator, layout, self)


class _Fragment:
    """A range of the model: its buffer ``[change | statistics | flag]`` and where it is."""

    def __init__(self, place: slice, statistics: slice) -> None:
        self.place, self.statistics = place, statistics
        self.size = place.stop - place.start
        self.buffer = np.zeros(self.size + statistics.stop - statistics.start + 1, np.float32)
        self.rows = 0
        self.due = 0
        self.handle: Pending[FloatArray] | None = None


class StreamingExchange(OuterExchange):
    """See :class:`StreamingDiLoCo`. All ranks call it equally often, so operations keep order."""

    apart = True

    def __init__(self, communicator: Communicator, layout: Layout, rule: StreamingDiLoCo) -> None:
        super().__init__(communicator, layout, DiLoCo(rule.learning_rate, rule.momentum))
        self._rule = rule
        self._windows = 0
        trained, size, count = layout.trained_size, layout.size, rule.fragments
        self._fragments = [
            _Fragment(
                slice(trained * i // count, trained * (i + 1) // count),
                slice(trained, trained if i else size),
            )
            for i in range(count)
        ]

    def after_window(
        self,
        weights: FloatArray,
        rows: int,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> int | None:
        self._windows += 1
        for fragment in self._fragments:
            fragment.rows += rows
        for fragment in self._fragments:
            if fragment.handle is not None and fragment.due <= self._windows:
                self._apply(fragment, weights, self._rule.alpha)
        turn, rest = divmod(self._windows, self._rule.period)
        if rest == 0:
            fragment = self._fragments[(turn - 1) % len(self._fragments)]
            self._send(fragment, weights)
            if not self._rule.delay:
                self._apply(fragment, weights, 0.0)
        return None

    def finish(self, weights: FloatArray) -> None:
        """Applies the fragments that are being exchanged, then exchanges each once more."""
        for fragment in sorted(self._fragments, key=lambda f: f.due):
            if fragment.handle is not None:
                self._apply(fragment, weights, self._rule.alpha)
        for fragment in self._fragments:
            self._send(fragment, weights)
        for fragment in self._fragments:
            self._apply(fragment, weights, 0.0)
        super().finish(weights)

    def _send(self, fragment: _Fragment, weights: FloatArray) -> None:
        place, buffer = fragment.place, fragment.buffer
        np.subtract(weights[place], self.center[place], out=buffer[: fragment.size])
        np.copyto(buffer[fragment.size : -1], weights[fragment.statistics])
        buffer[-1] = float(fragment.rows > 0)
        self.sent_bytes += buffer.nbytes
        fragment.handle = self.communicator.all_reduce_async(
            buffer, "weighted", weight=fragment.rows, out=buffer
        )
        fragment.rows = 0
        fragment.due = self._windows + self._rule.delay

    def _apply(self, fragment: _Fragment, weights: FloatArray, alpha: float) -> None:
        if fragment.handle is not None:
            fragment.handle.wait()
        fragment.handle = None
        buffer = fragment.buffer
        if not buffer[-1] > 0.0:
            return
        center = self.center[fragment.place]
        state = {name: array[fragment.place] for name, array in self.outer_state.items()}
        commit = Commit(0, self.communicator.size, self._windows, self._windows, batches=1, rows=1)
        self.outer.update(center, buffer[: fragment.size], state, commit, center)
        np.copyto(self.center[fragment.statistics], buffer[fragment.size : -1])
        for part in (fragment.place, fragment.statistics):
            local = weights[part]
            if alpha == 0.0:
                np.copyto(local, self.center[part])
            else:
                local *= np.float32(alpha)
                local += np.float32(1.0 - alpha) * self.center[part]
