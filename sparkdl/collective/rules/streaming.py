"""Streaming DiLoCo: one part of the model at a time is exchanged, while training goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.collective.communicator import Communicator, ReduceHandle
from sparkdl.collective.rules.exchange_rule import ExchangeRule, OuterExchange
from sparkdl.rules.diloco import DiLoCo
from sparkdl.rules.rule import Commit
from sparkdl.settings.values import require, require_fraction, require_positive, require_whole
from sparkdl.weights import FloatArray, Layout


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

    fragments: int = 4
    period: int = 5
    delay: int = 1
    alpha: float = 0.5
    learning_rate: float = 0.7
    momentum: float = 0.9

    name: ClassVar[str] = "streaming_diloco"
    exchanges = "weights"
    default_window: ClassVar[int] = 5

    def __post_init__(self) -> None:
        require_whole(self.name, "fragments", self.fragments, 1)
        require_whole(self.name, "period", self.period, 1)
        require_whole(self.name, "delay", self.delay, 0)
        turn = self.fragments * self.period
        require(
            self.delay < turn,
            self.name,
            "delay",
            f"fewer windows than a turn of all fragments ({turn})",
            self.delay,
        )
        require_fraction(self.name, "alpha", self.alpha)
        require_positive(self.name, "learning_rate", self.learning_rate)
        require_fraction(self.name, "momentum", self.momentum)

    def open(self, communicator: Communicator, layout: Layout) -> StreamingExchange:
        return StreamingExchange(communicator, layout, self)


class _Fragment:
    """A range of the model: its buffer ``[change | statistics | flag]`` and where it is."""

    def __init__(self, place: slice, statistics: slice) -> None:
        self.place, self.statistics = place, statistics
        self.size = place.stop - place.start
        count = self.size + statistics.stop - statistics.start
        self.buffer = np.zeros(count + 1, np.float32)
        self.rows = 0
        self.due = 0
        self.handle: ReduceHandle | None = None


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
        np.copyto(weights, self.center)

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
        number = self._windows
        commit = Commit(0, self.communicator.size, number, number, batches=1, rows=1)
        self.outer.update(center, buffer[: fragment.size], state, commit, center)
        np.copyto(self.center[fragment.statistics], buffer[fragment.size : -1])
        for part in (fragment.place, fragment.statistics):
            local = weights[part]
            if alpha == 0.0:
                np.copyto(local, self.center[part])
            else:
                local *= np.float32(alpha)
                local += np.float32(1.0 - alpha) * self.center[part]
