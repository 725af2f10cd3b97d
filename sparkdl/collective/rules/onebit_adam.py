"""1-bit Adam: after a warm-up only the signs of the momentum travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from sparkdl.collective.base import shard_edges
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.base import ExchangeRule, OptimizerExchange, choose_rate
from sparkdl.config import require_int
from sparkdl.errors import ConfigError
from sparkdl.optimizers.flat import Adam, State
from sparkdl.optimizers.keras_config import optimizer_from_config
from sparkdl.optimizers.options import require_not_negative
from sparkdl.weights import FloatArray, Layout

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class OneBitAdam(ExchangeRule):
    """Adam for ``freeze_step`` steps; then its ``v`` stays, and momentum travels as one bit each.

    With ``C(u) = sign(u) · mean|u|`` (one mean per variable and slice), after the freeze::

        u_i = beta_1 · m + (1 − beta_1) · g_i + e_i;   send C(u_i);   e_i = u_i − C(u_i)
        s   = Σ n_i C(u_i) / Σ n_i + d                 (each rank for its own slice)
        m   = C(s);   d = s − m;   send m
        x  −= rate · √(1 − beta_2^T) / (1 − beta_1^t) · m / (max(√v, floor) + epsilon)

    ``e`` is the worker's error, ``d`` the server's: nothing is lost, only late. All signs of a
    variable have one size while ``√v`` differs by its coordinates, so coordinates whose ``√v`` is
    tiny would be thrown about: ``floor`` bounds it from below, relative to the root mean square of
    ``√v`` over the variable. Coordinates that had no gradient at all during the warm-up stay put
    (their ``v`` is 0).

    A rank without rows sends nothing that counts, and keeps its error.

    Args:
        optimizer: The Adam to take, or its Keras config; None: the compiled one, which
            :meth:`bind` takes.
        freeze_step: Length of the warm-up, T; None: ``1 / (1 − beta_2)``, which is how far ``v``
            looks back. A run that is not longer is plain Adam.
        floor: See above; 0 is the paper's.

    References:
        Tang et al., 1-bit Adam: communication efficient large-scale training with Adam's
        convergence speed, 2021.
    """

    optimizer: Adam | None = None
    freeze_step: int | None = None
    floor: float = 0.1

    name: ClassVar[str] = "onebit_adam"
    exchanges = "optimizer"

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", _adam_of(self.optimizer))
        if self.freeze_step is not None:
            require_int(f"freeze_step of {self.name}", self.freeze_step, 1)
        require_not_negative(self.name, "floor", self.floor)

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        if self.optimizer is not None or optimizer is None:
            return self
        return replace(self, optimizer=_adam_of(optimizer))

    def open(self, communicator: Communicator, layout: Layout) -> OneBitAdamExchange:
        if self.optimizer is None:
            raise ConfigError(
                f"rule {self.name!r} has no optimizer",
                expected="bind(num_workers, optimizer) before open(), or OneBitAdam(optimizer=...)",
                received="optimizer=None",
            )
        return OneBitAdamExchange(communicator, layout, self, self.optimizer)


def _adam_of(config: Mapping[str, Any]) -> Adam:
    return optimizer_from_config(
        config,
        {"Adam": Adam},
        where="with one bit (rule 'onebit_adam')",
        hint="leave {option!r} out, or choose rule='mean'",
    )


class OneBitAdamExchange(OptimizerExchange):
    """See :class:`OneBitAdam`."""

    def __init__(
        self, communicator: Communicator, layout: Layout, rule: OneBitAdam, adam: Adam
    ) -> None:
        super().__init__(communicator, layout)
        self.optimizer = self._adam = adam
        self._floor = rule.floor
        self._freeze_step = rule.freeze_step or max(1, round(1.0 / (1.0 - adam.beta_2)))
        self._adam_state = adam.init(np.zeros(layout.trained_size, np.float32))
        size, count = layout.trained_size, communicator.size
        self._edges = shard_edges(size, count)
        cuts = {slot.offset for slot in layout.slots if slot.offset < size and slot.size}
        cuts |= {edge for edge in self._edges if edge < size}
        self._starts = np.array(sorted(cuts), np.int64)
        self._frozen: _Frozen | None = None

    def step(self, weights: FloatArray, rows: int, learning_rate: float | None = None) -> bool:
        rate = choose_rate(OneBitAdam.name, learning_rate, self._adam.learning_rate)
        trained = self.layout.trained_size
        x = weights[:trained]
        if self._frozen is None:
            if not self.average(self.whole, rows):
                return False
            self._adam.step(x, self.trained, self._adam_state, rate, x)
            if self._adam_state["steps"] >= self._freeze_step:
                self._frozen = self._freeze()
        else:
            if not self.average(self.tail, rows):
                return False
            self._step_frozen(self._frozen, x, rows, rate)
        np.copyto(weights[trained:], self.buffer[trained:])
        return True

    def state(self) -> State:
        """Adam's; the errors, each rank's own, begin anew after a load."""
        return {
            "scaled_mean": self._mean() / np.float32(1.0 - self._adam.beta_1),
            "scaled_mean_square": self._adam_state["scaled_mean_square"].copy(),
            "steps": self._adam_state["steps"],
        }

    def load_state(self, state: State) -> None:
        self._adam_state = {
            "scaled_mean": np.array(state["scaled_mean"], np.float32),
            "scaled_mean_square": np.array(state["scaled_mean_square"], np.float32),
            "steps": int(state["steps"]),
        }
        self._frozen = None
        self._frozen = self._freeze() if state["steps"] >= self._freeze_step else None

    def _mean(self) -> FloatArray:
        if self._frozen is not None:
            return self._frozen.mean
        scaled: FloatArray = self._adam_state["scaled_mean"]
        return scaled * np.float32(1.0 - self._adam.beta_1)

    def _mean_square(self) -> FloatArray:
        scaled: FloatArray = self._adam_state["scaled_mean_square"]
        return scaled * np.float32(1.0 - self._adam.beta_2)

    def _freeze(self) -> _Frozen:
        root = np.sqrt(self._mean_square())
        active = root > 0.0
        for slot in self.layout.slots:
            if slot.offset < root.size and slot.size:
                part = root[slot.offset : slot.offset + slot.size]
                least = self._floor * float(np.sqrt(np.mean(np.square(part))))
                np.maximum(part, np.float32(least), out=part)
        inverse = np.divide(
            np.float32(1.0), root + np.float32(self._adam.epsilon),
            out=np.zeros_like(root), where=active,
        )  # fmt: skip
        rank = self.communicator.rank
        mine = slice(self._edges[rank], self._edges[rank + 1])
        return _Frozen(self._mean(), inverse, active, mine)

    def _step_frozen(self, frozen: _Frozen, x: FloatArray, rows: int, rate: float) -> None:
        adam, u = self._adam, self.trained
        if rows:
            u *= np.float32(1.0 - adam.beta_1)
            u += np.float32(adam.beta_1) * frozen.mean
            u += frozen.worker_error
            u *= frozen.active
        else:
            u.fill(0.0)
        bits, scales = self._compress(u, 0, frozen.active)
        if rows:
            np.subtract(u, self._decompress(bits, scales, 0, u.size), out=frozen.worker_error)
            frozen.worker_error *= frozen.active
        weight = np.array([rows], np.float64)
        sent = np.concatenate([weight.view(np.uint8), scales.view(np.uint8), bits])
        total = self._mean_of_mine(self.all_gather(sent), frozen.mine)
        total += frozen.server_error
        total *= frozen.active[frozen.mine]
        bits, scales = self._compress(total, frozen.mine.start, frozen.active[frozen.mine])
        decoded = self._decompress(bits, scales, frozen.mine.start, total.size)
        np.subtract(total, decoded, out=frozen.server_error)
        frozen.server_error *= frozen.active[frozen.mine]
        self._gather_mean(frozen, np.concatenate([scales.view(np.uint8), bits]))
        self._adam_state["steps"] += 1
        steps = self._adam_state["steps"]
        corrected = np.sqrt(1.0 - adam.beta_2**self._freeze_step) / (1.0 - adam.beta_1**steps)
        change = frozen.mean * frozen.inverse
        change *= np.float32(rate * corrected)
        x -= change

    def _mean_of_mine(self, sent: list[npt.NDArray[Any]], mine: slice) -> FloatArray:
        """The row-weighted mean of all ranks' decoded momentum over this rank's slice."""
        weights = [float(message[:8].view(np.float64)[0]) for message in sent]
        total = np.zeros(mine.stop - mine.start, np.float32)
        first = int(np.searchsorted(self._starts, mine.start))
        scales_end = 8 + 4 * self._starts.size
        count = self._segments(mine.start, mine.stop).size
        for message, weight in zip(sent, weights, strict=True):
            if weight:
                scales = message[8:scales_end].view(np.float32)[first : first + count]
                decoded = self._decompress(
                    message[scales_end:], scales, mine.start, total.size, mine.start
                )
                decoded *= np.float32(weight / sum(weights))
                total += decoded
        return total

    def _gather_mean(self, frozen: _Frozen, sent: Bytes) -> None:
        """Every slice's new momentum, from the rank that owns it."""
        for rank, message in enumerate(self.all_gather(sent)):
            start, stop = self._edges[rank], self._edges[rank + 1]
            end = 4 * self._segments(start, stop).size
            scales = message[:end].view(np.float32)
            frozen.mean[start:stop] = self._decompress(message[end:], scales, start, stop - start)
        frozen.mean *= frozen.active

    def _segments(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Starts of the pieces with a scale of their own within a range of the buffer."""
        first, last = np.searchsorted(self._starts, (start, stop))
        return self._starts[first:last] - start

    def _compress(
        self, values: FloatArray, start: int, active: npt.NDArray[np.bool_]
    ) -> tuple[Bytes, FloatArray]:
        """Signs as bits, and each piece's mean size over its active coordinates."""
        if not values.size:
            return np.zeros(0, np.uint8), np.zeros(0, np.float32)
        segments = self._segments(start, start + values.size)
        sums = np.add.reduceat(np.abs(values), segments, dtype=np.float64)
        counts = np.add.reduceat(active, segments, dtype=np.int64)
        return np.packbits(values >= 0.0), (sums / np.maximum(counts, 1)).astype(np.float32)

    def _decompress(
        self, bits: Bytes, scales: FloatArray, start: int, size: int, skip: int = 0
    ) -> FloatArray:
        """The ``size`` values from ``start`` of the model on; ``skip`` of the bits are before."""
        first = skip // 8
        raw = np.unpackbits(bits[first : -(-(skip + size) // 8)])
        signs = raw[skip - 8 * first :][:size].astype(np.float32)
        signs *= np.float32(2.0)
        signs -= np.float32(1.0)
        segments = self._segments(start, start + size)
        signs *= np.repeat(scales, np.diff(np.append(segments, size)))
        return signs


class _Frozen:
    """What the steps after the warm-up go by; ``mine`` is this rank's slice."""

    def __init__(
        self, mean: FloatArray, inverse: FloatArray, active: npt.NDArray[np.bool_], mine: slice
    ) -> None:
        self.mean, self.inverse, self.active, self.mine = mean, inverse, active, mine
        self.worker_error = np.zeros_like(mean)
        self.server_error = np.zeros(mine.stop - mine.start, np.float32)
