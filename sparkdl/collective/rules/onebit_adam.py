"""1-bit Adam: after a warm-up only the signs of the momentum are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import shard_edges
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import (
    ExchangeRule,
    OptimizerExchange,
    WeightsWithin,
    bound_optimizer,
    choose_rate,
)
from sparkdl.errors import ConfigError
from sparkdl.optimizers.blocks import BLOCK, blocks, scratch
from sparkdl.optimizers.flat import FlatAdam, State, optimizer_from_config, without_scaling
from sparkdl.settings.values import option, require_not_negative, whole_from
from sparkdl.weights import FloatArray, Layout

Bytes = npt.NDArray[np.uint8]

# The eight signs that a byte stands for: 8 KiB, which stay in a core's first cache.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
_SIGNS = np.where(_BITS, np.float32(-1.0), np.float32(1.0))


class SignCode:
    """``C(u) = sign(u) · mean|u|``, the mean over the active coordinates of a piece.

    The methods work on a range of the vector that begins and ends where pieces do. Not thread-safe.

    Args:
        size: Size of the vector.
        starts: Where its pieces begin: increasing, from 0.
        active: Coordinates that count; the others must be 0 when encoded, and decode to 0.
    """

    def __init__(
        self, size: int, starts: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]
    ) -> None:
        self._starts = starts
        self._ends = np.append(starts[1:], size)
        self._counts = (
            np.add.reduceat(active, starts, dtype=np.int64) if size else np.zeros(0, np.int64)
        )
        self._mask = None if active.all() else active.astype(np.float32)
        self._scratch = scratch(size)

    def pieces(self, start: int, stop: int) -> int:
        """Pieces in a range: how many sizes belong to it."""
        first, last = np.searchsorted(self._starts, (start, stop))
        return int(last - first)

    def silence(self, values: FloatArray, start: int = 0) -> None:
        """Sets the coordinates of a range that are not active to 0."""
        if self._mask is not None:
            np.multiply(values, self._mask[start : start + values.size], out=values)

    def encode(self, values: FloatArray, start: int = 0) -> tuple[Bytes, FloatArray]:
        """The signs of a range (1 is below zero), packed, and its pieces' mean sizes."""
        sizes = np.zeros(self.pieces(start, start + values.size), np.float32)
        for number, place in self._parts(start, values.size):
            part = self._scratch[: place.stop - place.start]
            np.abs(values[place], out=part)
            sizes[number] += np.add.reduce(part)
        first = int(np.searchsorted(self._starts, start))
        sizes /= np.maximum(self._counts[first : first + sizes.size], 1)
        return np.packbits(np.signbit(values)), sizes

    def keep_rest(self, values: FloatArray, sizes: FloatArray, start: int, out: FloatArray) -> None:
        """``out = values − decoded``, what the code of ``values`` with these sizes loses."""
        for number, place in self._parts(start, values.size):
            part = self._scratch[: place.stop - place.start]
            np.copysign(sizes[number], values[place], out=part)
            np.subtract(values[place], part, out=out[place])
        self.silence(out, start)

    def decode(
        self, bits: Bytes, sizes: FloatArray, start: int, out: FloatArray, skip: int = 0
    ) -> None:
        """Writes the values of a range into ``out``; ``skip`` of the bits are before it."""
        position = skip
        for part in blocks(out.size):
            count = part.stop - part.start
            first, last = position // 8, -(-(position + count) // 8)
            table = np.take(_SIGNS, bits[first:last], axis=0, mode="clip").reshape(-1)
            np.copyto(out[part], table[position - 8 * first :][:count])
            position += count
        for number, place in self._parts(start, out.size):
            np.multiply(out[place], sizes[number], out=out[place])
        self.silence(out, start)

    def _parts(self, start: int, size: int) -> Iterator[tuple[int, slice]]:
        """Each piece's number in the range, with those of its parts that fit a cache, as slices."""
        first = int(np.searchsorted(self._starts, start))
        for number in range(self.pieces(start, start + size)):
            low = int(self._starts[first + number]) - start
            high = int(self._ends[first + number]) - start
            for at in range(low, high, BLOCK):
                yield number, slice(at, min(at + BLOCK, high))


@dataclass(frozen=True)
class OneBitAdam(ExchangeRule):
    """Adam for ``freeze_step`` steps; then ``v`` is kept, and the momentum is sent as signs.

    With ``C(u) = sign(u) · mean|u|`` (one mean per variable and slice), after the freeze::

        u_i = beta_1 · m + (1 − beta_1) · g_i + e_i;   send C(u_i);   e_i = u_i − C(u_i)
        s   = Σ n_i C(u_i) / Σ n_i + d                 (each rank for its own slice)
        m   = C(s);   d = s − m;   send m
        x  −= rate · √(1 − beta_2^T) / (1 − beta_1^t) · m / (max(√v, floor) + epsilon)

    ``e`` and ``d`` hold what the encoding has lost (on the sender, and on the rank that joins the
    slice): it is added to what is encoded next. All coordinates of a variable get momentum of one
    size, while ``√v`` differs between them. A coordinate with a tiny ``√v`` would take huge steps,
    so ``floor`` bounds ``√v`` from below, relative to its root mean square over the variable.
    Coordinates that had no gradient during the warm-up are not changed (their ``v`` is 0).

    What a rank without rows sends has weight 0; it keeps its error.

    Args:
        optimizer: The Adam to take, or its Keras config; None: the compiled one, which
            :meth:`bind` takes.
        freeze_step: Length of the warm-up, T; None: ``1 / (1 − beta_2)``, the steps over which
            ``v`` is a mean. A run of at most T steps is plain Adam.
        floor: See above; 0 is the paper's.

    References:
        Tang et al., 1-bit Adam: communication efficient large-scale training with Adam's
        convergence speed, 2021.
    """

    optimizer: FlatAdam | None = None
    freeze_step: int | None = option(None, whole_from(1, or_none=True))
    floor: float = option(0.1, require_not_negative)

    name: ClassVar[str] = "onebit_adam"
    exchanges = "optimizer"

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", _adam_of(self.optimizer))
        super().__post_init__()

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        if self.optimizer is not None or optimizer is None:
            return self
        return replace(self, optimizer=_adam_of(without_scaling(optimizer)))

    def open(self, communicator: Communicator, layout: Layout) -> OneBitAdamExchange:
        return OneBitAdamExchange(communicator, layout, self, bound_optimizer(self.optimizer, self))


def _adam_of(config: Mapping[str, Any]) -> FlatAdam:
    hint = "leave {option!r} out, or choose rule='mean'"
    where = "with one bit (rule 'onebit_adam')"
    adam = optimizer_from_config(config, (FlatAdam,), where=where, hint=hint)
    if adam.amsgrad:
        raise ConfigError(
            f"optimizer 'Adam' {where}: option 'amsgrad' is not supported",
            expected="a variance that stands still after the warm-up", received="amsgrad=True",
            hint=hint.format(option="amsgrad"),
        )  # fmt: skip
    return adam


class OneBitAdamExchange(OptimizerExchange):
    def __init__(
        self, communicator: Communicator, layout: Layout, rule: OneBitAdam, adam: FlatAdam
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
        self._weights = np.empty(size, np.float32)

    def step(
        self, weights_within: WeightsWithin, rows: int, learning_rate: float | None = None
    ) -> bool:
        rate = choose_rate(OneBitAdam.name, learning_rate, self._adam.learning_rate)
        trained = self.layout.trained_size
        x = self._weights
        for place, values in weights_within(slice(0, trained)):
            x[place] = values
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
        np.copyto(self.trained, x)
        self.hold_still(weights_within, slice(0, trained))
        return True

    def state(self) -> State:
        """Adam's; the errors, which differ between ranks, are 0 again after a load."""
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

    def _freeze(self) -> _Frozen:
        scaled: FloatArray = self._adam_state["scaled_mean_square"]
        root = np.sqrt(scaled * np.float32(1.0 - self._adam.beta_2))
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
        return _Frozen(self._mean(), inverse, SignCode(root.size, self._starts, active), mine)

    def _step_frozen(self, frozen: _Frozen, x: FloatArray, rows: int, rate: float) -> None:
        code, u = frozen.code, self.trained
        if rows:
            self._add_gradient(frozen, u)
        else:
            u.fill(0.0)
        bits, sizes = code.encode(u)
        if rows:
            code.keep_rest(u, sizes, 0, frozen.worker_error)
        weight = np.array([rows], np.float64)
        sent = np.concatenate([weight.view(np.uint8), sizes.view(np.uint8), bits])
        start, total = frozen.mine.start, frozen.total
        self._mean_of_mine(self.all_gather(sent), frozen)
        total += frozen.server_error
        bits, sizes = code.encode(total, start)
        code.keep_rest(total, sizes, start, frozen.server_error)
        self._gather_mean(frozen, np.concatenate([sizes.view(np.uint8), bits]))
        self._adam_state["steps"] += 1
        steps, adam = self._adam_state["steps"], self._adam
        corrected = np.sqrt(1.0 - adam.beta_2**self._freeze_step) / (1.0 - adam.beta_1**steps)
        factor, change = np.float32(rate * corrected), scratch(x.size)
        for part in blocks(x.size):
            step = change[: part.stop - part.start]
            np.multiply(frozen.mean[part], frozen.inverse[part], out=step)
            np.multiply(step, factor, out=step)
            np.subtract(x[part], step, out=x[part])

    def _add_gradient(self, frozen: _Frozen, u: FloatArray) -> None:
        """``u = beta_1 · m + (1 − beta_1) · u + e``, of the active coordinates."""
        decay, rest = np.float32(self._adam.beta_1), np.float32(1.0 - self._adam.beta_1)
        buffer = scratch(u.size)
        for part in blocks(u.size):
            values, old = u[part], buffer[: part.stop - part.start]
            np.multiply(values, rest, out=values)
            np.multiply(frozen.mean[part], decay, out=old)
            np.add(values, old, out=values)
            np.add(values, frozen.worker_error[part], out=values)
        frozen.code.silence(u)

    def _mean_of_mine(self, sent: list[npt.NDArray[Any]], frozen: _Frozen) -> None:
        """The row-weighted mean of all ranks' decoded momentum over this rank's slice."""
        weights = [float(message[:8].view(np.float64)[0]) for message in sent]
        code, start, stop = frozen.code, frozen.mine.start, frozen.mine.stop
        first = code.pieces(0, start)
        last = first + code.pieces(start, stop)
        end = 8 + 4 * code.pieces(0, self.layout.trained_size)
        frozen.total.fill(0.0)
        decoded = np.empty_like(frozen.total)
        for message, weight in zip(sent, weights, strict=True):
            if weight:
                sizes = message[8:end].view(np.float32)[first:last]
                sizes = sizes * np.float32(weight / sum(weights))
                code.decode(message[end:], sizes, start, decoded, skip=start)
                frozen.total += decoded

    def _gather_mean(self, frozen: _Frozen, sent: Bytes) -> None:
        """Every slice's new momentum, from the rank that owns it."""
        for rank, message in enumerate(self.all_gather(sent)):
            start, stop = self._edges[rank], self._edges[rank + 1]
            end = 4 * frozen.code.pieces(start, stop)
            sizes = message[:end].view(np.float32)
            frozen.code.decode(message[end:], sizes, start, frozen.mean[start:stop])


class _Frozen:
    """The vectors of the steps after the warm-up; ``mine`` is this rank's slice."""

    def __init__(self, mean: FloatArray, inverse: FloatArray, code: SignCode, mine: slice) -> None:
        self.mean, self.inverse, self.code, self.mine = mean, inverse, code, mine
        self.worker_error = np.zeros_like(mean)
        self.total = np.zeros(mine.stop - mine.start, np.float32)
        self.server_error = np.zeros_like(self.total)
