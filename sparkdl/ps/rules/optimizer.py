"""Optimizers that run on the server: SGD, Adagrad, RMSprop, Adam and AdamW on the flat center.

Workers send the mean gradient ``g`` of their window and take the new center back. The arithmetic is
:mod:`sparkdl.optimizers.flat`'s, which takes the same steps as the Keras optimizer of its name with
the same options: one worker is local training with that optimizer. Step t is the t-th commit of
all workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sparkdl.optimizers import flat
from sparkdl.ps.rules.options import learning_rate_of
from sparkdl.ps.rules.rule import Commit, Rule, State
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class ServerOptimizer(flat.FlatOptimizer, Rule):
    """Base of the optimizers on the server.

    Args:
        learning_rate: Step size; None takes the worker's learning rate of each commit (so that a
            schedule or a callback on the worker counts).
    """

    payload: ClassVar[Literal["delta", "gradient"]] = "gradient"  # type: ignore[misc]
    default_window: ClassVar[int] = 1

    def rate(self, commit: Commit) -> float:
        """The learning rate of this step.

        Raises:
            ConfigError: Neither the rule nor the commit has one.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return learning_rate_of(self.name, commit)

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One step along ``-delta``, the gradient."""
        self.step(center, delta, state, self.rate(commit), out)


@dataclass(frozen=True)
class SGD(flat.SGD, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.SGD` on the server."""


@dataclass(frozen=True)
class Adagrad(flat.Adagrad, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.Adagrad` on the server."""


@dataclass(frozen=True)
class RMSprop(flat.RMSprop, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.RMSprop` on the server."""


@dataclass(frozen=True)
class Adam(flat.Adam, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.Adam` on the server."""


@dataclass(frozen=True)
class AdamW(flat.AdamW, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.AdamW` on the server."""
