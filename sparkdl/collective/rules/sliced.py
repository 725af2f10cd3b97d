"""Parameter-sliced all-reduce: each rank takes the optimizer step for a slice of the weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.arithmetic import shard_edges
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import (
    ExchangeRule,
    OptimizerExchange,
    WeightsWithin,
    choose_rate,
)
from sparkdl.errors import ConfigError
from sparkdl.optimizers.flat import FlatOptimizer, State
from sparkdl.optimizers.keras_config import FLAT_CLASSES, optimizer_from_config
from sparkdl.weights import FloatArray, Layout

_PIECE = 1 << 22
"""Elements of a slice that travel at once to the rank that keeps the whole state."""


@dataclass(frozen=True)
class Sliced(ExchangeRule):
    """Reduce-scatter of the gradient, optimizer step on the own slice, all-gather of the weights.

    It sends as much as an all-reduce, but each rank keeps optimizer state for ``1/p`` of the
    weights and computes ``1/p`` of the step. The mean is row-weighted, as in :class:`Mean`, and the
    optimizers treat elements one by one, so the result is exact.

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

    name: ClassVar[str] = "sliced"
    exchanges = "optimizer"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", _counterpart(self.optimizer))

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        if self.optimizer is not None or optimizer is None:
            return self
        return replace(self, optimizer=_counterpart(optimizer))

    def open(self, communicator: Communicator, layout: Layout) -> SlicedExchange:
        if self.optimizer is None:
            raise ConfigError(
                f"rule {self.name!r} has no optimizer",
                expected="bind(num_workers, optimizer) before open(), or Sliced(optimizer=...)",
                received="optimizer=None",
                hint="SparkModel.fit binds the rule to the compiled optimizer",
            )
        return SlicedExchange(communicator, layout, self.optimizer)


def _counterpart(config: Mapping[str, Any]) -> FlatOptimizer:
    return optimizer_from_config(
        config,
        FLAT_CLASSES,
        where="in slices (rule 'sliced')",
        hint="leave {option!r} out, or choose rule='mean'",
    )


class SlicedExchange(OptimizerExchange):
    """See :class:`Sliced`."""

    def __init__(
        self, communicator: Communicator, layout: Layout, optimizer: FlatOptimizer
    ) -> None:
        super().__init__(communicator, layout)
        self.optimizer = optimizer
        size, rank, count = layout.trained_size, communicator.rank, communicator.size
        edges = shard_edges(size, count)
        self._slices = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self._mine = self._slices[rank]
        self.own_state: State = optimizer.init(
            np.zeros(self._mine.stop - self._mine.start, np.float32)
        )
        """Optimizer state of this rank's slice."""

    def step(
        self, weights_within: WeightsWithin, rows: int, learning_rate: float | None = None
    ) -> bool:
        rate = choose_rate(Sliced.name, learning_rate, self.optimizer.learning_rate)
        if not self.average(self.tail, rows):
            return False
        self.sent_bytes += self.trained.nbytes
        communicator, mine = self.communicator, self.trained[self._mine]
        communicator.reduce_scatter(self.trained, "weighted", weight=rows, out=mine)
        self._step_own(weights_within, rate)
        self.sent_bytes += mine.nbytes
        for root, place in enumerate(self._slices):
            part = self.trained[place]
            communicator.broadcast(part, root, out=part)
        return True

    def _step_own(self, weights_within: WeightsWithin, rate: float) -> None:
        """Replaces this rank's slice of the gradient by that of the new weights."""
        state, first = self.own_state, self._mine.start
        counts = {name: v for name, v in state.items() if not isinstance(v, np.ndarray)}
        after = counts
        for place, weights in weights_within(self._mine):
            own = slice(place.start - first, place.stop - first)
            after = {n: v[own] if isinstance(v, np.ndarray) else v for n, v in state.items()}
            self.optimizer.step(weights, self.trained[place], after, rate, weights)
            self.trained[place] = weights
        if after is counts:  # fewer weights than ranks: this one counts the step all the same
            nothing = np.empty(0, np.float32)
            after = {n: counts.get(n, nothing) for n in state}
            self.optimizer.step(nothing, nothing, after, rate, nothing)
        state.update({name: after[name] for name in counts})

    def state(self) -> State:
        """The whole optimizer state, as one process would have it; empty but on the keeper."""
        keeps = self.keeper in (None, self.communicator.rank)
        found: State = {}
        for name, own in self.own_state.items():
            if not isinstance(own, np.ndarray):
                found[name] = own
                continue
            whole = np.empty(self.layout.trained_size if keeps else 0, np.float32)
            for root, place in enumerate(self._slices):
                self._copy_slice(own, root, place, whole[place])
            found[name] = whole
        return found if keeps else {}

    def _copy_slice(self, own: FloatArray, root: int, place: slice, out: FloatArray) -> None:
        """Copies a rank's slice to ``out``, in pieces: no rank but the keeper holds a whole one."""
        for first in range(0, place.stop - place.start, _PIECE):
            size = min(_PIECE, place.stop - place.start - first)
            mine = root == self.communicator.rank
            piece = own[first : first + size] if mine else np.empty(size, np.float32)
            self.communicator.broadcast(piece, root, out=piece)
            if out.size:
                out[first : first + size] = piece

    def load_state(self, state: State) -> None:
        for name, own in self.own_state.items():
            if isinstance(own, np.ndarray):
                np.copyto(own, state[name][self._mine])
            else:
                self.own_state[name] = state[name]
