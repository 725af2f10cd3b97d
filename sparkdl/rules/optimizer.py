"""Optimizers that run on the server: SGD, Adagrad, RMSprop, Adam and AdamW on the flat center.

Workers send the mean gradient ``g`` of their window and take the new center back. The arithmetic is
:mod:`sparkdl.optimizers.flat`'s, which takes the same steps as the Keras optimizer of its name with
the same options: one worker is local training with that optimizer. Step t is the t-th commit of
all workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparkdl.optimizers.flat import (
    FlatAdagrad,
    FlatAdam,
    FlatAdamW,
    FlatOptimizer,
    FlatRMSprop,
    FlatSGD,
    optimizer_from_config,
)
from sparkdl.rules.rule import Commit, Rule, State, learning_rate_of
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class ServerOptimizer(FlatOptimizer, Rule):
    """Base of the optimizers on the server.

    Args:
        learning_rate: Step size; None takes the worker's learning rate of each commit (so that a
            schedule or a callback on the worker counts).
    """

    payload: ClassVar[Literal["delta", "gradient"]] = "gradient"  # type: ignore[misc]
    default_window: ClassVar[int] = 1
    elementwise: ClassVar[bool] = True

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
        self.step(center, delta, state, self.rate(commit), out)


@dataclass(frozen=True)
class SGD(FlatSGD, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.FlatSGD` on the server."""


@dataclass(frozen=True)
class Adagrad(FlatAdagrad, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.FlatAdagrad` on the server."""


@dataclass(frozen=True)
class RMSprop(FlatRMSprop, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.FlatRMSprop` on the server."""


@dataclass(frozen=True)
class Adam(FlatAdam, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.FlatAdam` on the server."""


@dataclass(frozen=True)
class AdamW(FlatAdamW, ServerOptimizer):
    """:class:`sparkdl.optimizers.flat.FlatAdamW` on the server."""


def from_keras_config(config: Mapping[str, Any]) -> ServerOptimizer:
    """The server's counterpart of a serialized Keras optimizer.

    Raises:
        UnknownNameError: The server has no such optimizer.
        ConfigError: An option that the server cannot honour is switched on.

    Example:
        >>> from_keras_config({'class_name': 'SGD', 'config': {'learning_rate': 0.5}})
        SGD(learning_rate=0.5, momentum=0.0, nesterov=False)
    """
    return optimizer_from_config(
        config, (SGD, Adagrad, RMSprop, Adam, AdamW), where="on the server",
        hint="leave {option!r} out, or let the workers optimize (rule='bsp' or 'dynsgd')",
    )  # fmt: skip
