"""Parameter-sliced all-reduce: each rank takes the optimizer step for a slice of the weights."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.arithmetic import shard_edges
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import (
    ExchangeRule,
    OptimizerExchange,
    WeightsWithin,
    bound_optimizer,
    choose_rate,
)
from sparkdl.files.model_file import store_arrays
from sparkdl.files.run_state import StoredBytes
from sparkdl.optimizers.blocks import blocks
from sparkdl.optimizers.flat import (
    FLAT_CLASSES,
    FlatOptimizer,
    State,
    optimizer_from_config,
    without_scaling,
)
from sparkdl.weights import FloatArray, Layout

_PIECE = 1 << 22
"""Elements of a slice that are stepped at once, or travel to the rank that keeps the state."""


@dataclass(frozen=True)
class AroundStep:
    """The options of a Keras optimizer that act before and after its step.

    Args:
        clipnorm: Largest norm of the gradient of each variable; None for no limit.
        global_clipnorm: Largest norm of the whole gradient.
        clipvalue: Largest absolute value of a gradient's element.
        use_ema: Whether an average of the weights is kept.
        ema_momentum: Share of the average before.
        ema_overwrite_frequency: Steps after which the average becomes the weights; None: never.
    """

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None
    use_ema: bool = False
    ema_momentum: float = 0.99
    ema_overwrite_frequency: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AroundStep:
        """That of a serialized Keras optimizer."""
        options = config.get("config", {})
        return cls(**{f.name: options[f.name] for f in fields(cls) if f.name in options})


@dataclass(frozen=True)
class Sliced(ExchangeRule):
    """Reduce-scatter of the gradient, optimizer step on the own slice, all-gather of the weights.

    It sends as much as an all-reduce, but each rank keeps optimizer state for ``1/p`` of the
    weights and computes ``1/p`` of the step. The mean is row-weighted, as in :class:`Mean`, and the
    optimizers treat elements one by one, so the result is exact. Of norms that clip a gradient
    each rank adds up its own slice; their sums are one small all-reduce.

    Args:
        optimizer: What steps the slices; None: the counterpart of the compiled Keras optimizer
            (SGD, Adagrad, RMSprop, Adam, AdamW), which :meth:`bind` makes. A Keras config
            ``{'class_name': ..., 'config': {...}}`` is taken, too.

    References:
        Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models,
        2020 (stage 1); Dai et al., BigDL: a distributed deep learning framework for big data,
        2019.
    """

    optimizer: FlatOptimizer | None = None
    around: AroundStep = field(default=AroundStep(), init=False)
    """The compiled optimizer's options around its step, which :meth:`bind` finds."""

    name: ClassVar[str] = "sliced"
    exchanges = "optimizer"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", _counterpart(self.optimizer))

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        if self.optimizer is not None or optimizer is None:
            return self
        optimizer = without_scaling(optimizer)
        bound = replace(self, optimizer=_counterpart(optimizer, beside=_AROUND))
        object.__setattr__(bound, "around", AroundStep.of(optimizer))
        return bound

    def open(self, communicator: Communicator, layout: Layout) -> SlicedExchange:
        return SlicedExchange(
            communicator, layout, bound_optimizer(self.optimizer, self), self.around
        )

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        """The attributes of the Keras optimizer that have the state; see the optimizer's."""
        return slots_of(self.optimizer, self.around) if self.optimizer else {}


_AROUND = tuple(option.name for option in fields(AroundStep))


def slots_of(optimizer: FlatOptimizer, around: AroundStep) -> dict[str, tuple[str, float]]:
    """Each array of the state -> the attribute with Keras' variables, and a factor."""
    slots = optimizer.keras_slots()
    if around.use_ema:
        slots = {**slots, "average": ("_model_variables_moving_average", 1.0)}
    return slots


def _counterpart(config: Mapping[str, Any], beside: Collection[str] = ()) -> FlatOptimizer:
    return optimizer_from_config(
        config, FLAT_CLASSES, where="in slices (rule 'sliced')",
        hint="leave {option!r} out, or choose rule='mean'", beside=beside,
    )  # fmt: skip


class SlicedExchange(OptimizerExchange):
    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        optimizer: FlatOptimizer,
        around: AroundStep,
    ) -> None:
        super().__init__(communicator, layout)
        self.optimizer, self.around = optimizer, around
        edges = shard_edges(layout.trained_size, communicator.size)
        self._slices = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self._mine = self._slices[communicator.rank]
        size = self._mine.stop - self._mine.start
        self.own_state: State = optimizer.init(np.zeros(size, np.float32))
        """Optimizer state of this rank's slice."""
        if around.use_ema:
            self.own_state |= {"average": np.zeros(size, np.float32), "averaged": 0}

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        return slots_of(self.optimizer, self.around)

    def step(
        self, weights_within: WeightsWithin, rows: int, learning_rate: float | None = None
    ) -> bool:
        rate = choose_rate(Sliced.name, learning_rate, self.optimizer.learning_rate)
        if not self.average(self.tail, rows):
            return False
        self.sent_bytes += self.trained.nbytes
        communicator, mine = self.communicator, self.trained[self._mine]
        communicator.reduce_scatter(self.trained, "weighted", weight=rows, out=mine)
        self._clip(mine)
        self._step_own(weights_within, rate)
        self.hold_still(weights_within, self._mine)
        self._average(mine)
        self.sent_bytes += mine.nbytes
        for root, place in enumerate(self._slices):
            part = self.trained[place]
            communicator.broadcast(part, root, out=part)
        return True

    def _clip(self, mine: FloatArray) -> None:
        """Does to this rank's slice of the gradient what Keras does to the whole of it."""
        around, first = self.around, self._mine.start
        if around.clipnorm or around.global_clipnorm:
            within = [s for s in self.layout.slots if s.offset < self.layout.trained_size]
            own = [
                slice(max(s.offset - first, 0), max(min(s.offset + s.size - first, mine.size), 0))
                for s in within
            ]
            sums = np.array([float(np.dot(mine[part], mine[part])) for part in own])
            norms = np.sqrt(self.communicator.all_reduce(sums))
            if around.clipnorm:
                for part, norm in zip(own, norms, strict=True):
                    mine[part] *= np.float32(around.clipnorm / max(norm, around.clipnorm))
            elif around.global_clipnorm:
                whole = float(np.sqrt(np.dot(norms, norms)))
                scale = around.global_clipnorm / max(whole, around.global_clipnorm)
                mine *= np.float32(scale if np.isfinite(whole) else np.nan)
        elif around.clipvalue:
            np.clip(mine, -around.clipvalue, around.clipvalue, out=mine)

    def _average(self, mine: FloatArray) -> None:
        """Takes this rank's slice of the new weights into their average."""
        if not self.around.use_ema:
            return
        state, every = self.own_state, self.around.ema_overwrite_frequency
        momentum = np.float32(self.around.ema_momentum if state["averaged"] else 0.0)
        average: FloatArray = state["average"]
        for part in blocks(average.size):
            average[part] *= momentum
            average[part] += (np.float32(1.0) - momentum) * mine[part]
        state["averaged"] += 1
        if every and state["averaged"] % every == 0:
            np.copyto(mine, average)

    def _step_own(self, weights_within: WeightsWithin, rate: float) -> None:
        """Replaces this rank's slice of the gradient by that of the new weights."""
        state, first = self.own_state, self._mine.start
        counts = {name: v for name, v in state.items() if not isinstance(v, np.ndarray)}
        after = counts
        for place, weights in _joined(weights_within(self._mine)):
            own = slice(place.start - first, place.stop - first)
            after = {n: v[own] if isinstance(v, np.ndarray) else v for n, v in state.items()}
            # As another view: NumPy steps it, since numba would take 154 MB of each process.
            self.optimizer.step(weights, self.trained[place], after, rate, weights[:])
            self.trained[place] = weights
        if after is counts:  # fewer weights than ranks: this one counts the step all the same
            nothing = np.empty(0, np.float32)
            after = {n: counts.get(n, nothing) for n in state}
            self.optimizer.step(nothing, nothing, after, rate, nothing)
        state.update({name: after[name] for name in counts})

    def state(self) -> State:
        """The whole optimizer state, as one process would have it; empty but on the keeper."""
        counts, arrays = self._parts()
        whole = {name: np.concatenate(list(parts)) for name, parts in arrays}
        return counts | whole if self._keeps else {}

    def packed_state(self) -> bytes | StoredBytes:
        counts, arrays = self._parts()
        if self._keeps:
            size = self.layout.trained_size
            return store_arrays(counts, ((name, size, parts) for name, parts in arrays))
        for _, parts in arrays:
            collections.deque(parts, maxlen=0)
        return b""

    @property
    def _keeps(self) -> bool:
        return self.keeper in (None, self.communicator.rank)

    def _parts(self) -> tuple[State, Iterator[tuple[str, Iterator[FloatArray]]]]:
        """The counts, and name -> the parts of each array, which all ranks must go through."""
        counts = {n: v for n, v in self.own_state.items() if not isinstance(v, np.ndarray)}
        arrays = {n: v for n, v in self.own_state.items() if isinstance(v, np.ndarray)}
        return counts, ((name, self._parts_of(own)) for name, own in arrays.items())

    def _parts_of(self, own: FloatArray) -> Iterator[FloatArray]:
        """All slices in order, in pieces: no rank holds a whole one of another."""
        for root, place in enumerate(self._slices):
            mine = root == self.communicator.rank
            for first in range(0, place.stop - place.start, _PIECE):
                size = min(_PIECE, place.stop - place.start - first)
                piece = own[first : first + size] if mine else np.empty(size, np.float32)
                self.communicator.broadcast(piece, root, out=piece)
                yield piece

    def load_state(self, state: State) -> None:
        for name, own in self.own_state.items():
            if isinstance(own, np.ndarray):
                np.copyto(own, state[name][self._mine])
            else:
                self.own_state[name] = state[name] if name in state else state["steps"]


def _joined(pieces: Iterable[tuple[slice, FloatArray]]) -> Iterator[tuple[slice, FloatArray]]:
    """Joins pieces that follow each other: a step of few elements takes as long as one of many."""
    waiting: list[tuple[slice, FloatArray]] = []
    for place, values in pieces:
        if waiting and place.stop - waiting[0][0].start > _PIECE:
            yield _one_piece(waiting)
            waiting = []
        waiting.append((place, values))
    if waiting:
        yield _one_piece(waiting)


def _one_piece(pieces: list[tuple[slice, FloatArray]]) -> tuple[slice, FloatArray]:
    place = slice(pieces[0][0].start, pieces[-1][0].stop)
    return place, pieces[0][1] if len(pieces) == 1 else np.concatenate([v for _, v in pieces])
