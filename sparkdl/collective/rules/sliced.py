"""Parameter-sliced all-reduce: each rank takes the optimizer step for a slice of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, OptimizerExchange, choose_rate
from sparkdl.errors import ConfigError
from sparkdl.optimizers.flat import FlatOptimizer, State
from sparkdl.optimizers.keras_config import FLAT_CLASSES, optimizer_from_config
from sparkdl.weights import FloatArray, Layout


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
        self._mine = slice(size * rank // count, size * (rank + 1) // count)
        self.own_state: State = optimizer.init(
            np.zeros(self._mine.stop - self._mine.start, np.float32)
        )
        """Optimizer state of this rank's slice."""

    def step(self, weights: FloatArray, rows: int, learning_rate: float | None = None) -> bool:
        rate = choose_rate(Sliced.name, learning_rate, self.optimizer.learning_rate)
        if not self.average(self.tail, rows):
            return False
        trained = self.layout.trained_size
        self.sent_bytes += self.trained.nbytes
        gradient = self.communicator.reduce_scatter(self.trained, "weighted", weight=rows)
        part = weights[self._mine]
        self.optimizer.step(part, gradient, self.own_state, rate, part)
        np.concatenate(self.all_gather(part), out=weights[:trained])
        np.copyto(weights[trained:], self.buffer[trained:])
        return True

    def state(self) -> State:
        """The whole optimizer state, as one process would have it."""
        return {
            name: np.concatenate(self.all_gather(value)) if isinstance(value, np.ndarray) else value
            for name, value in self.own_state.items()
        }

    def load_state(self, state: State) -> None:
        for name, own in self.own_state.items():
            if isinstance(own, np.ndarray):
                np.copyto(own, state[name][self._mine])
            else:
                self.own_state[name] = state[name]
