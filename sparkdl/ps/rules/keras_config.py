"""From a Keras optimizer's config dict to the optimizer on the server. Keras is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdl.optimizers.keras_config import optimizer_from_config
from sparkdl.ps.rules.optimizer import SGD, Adagrad, Adam, AdamW, RMSprop, ServerOptimizer

_CLASSES: dict[str, type[ServerOptimizer]] = {
    "SGD": SGD,
    "Adagrad": Adagrad,
    "RMSprop": RMSprop,
    "Adam": Adam,
    "AdamW": AdamW,
}


def from_keras_config(config: Mapping[str, Any]) -> ServerOptimizer:
    """The server's counterpart of a serialized Keras optimizer.

    Args:
        config: As for :func:`sparkdl.optimizers.keras_config.optimizer_from_config`.

    Raises:
        UnknownNameError: The server has no such optimizer.
        ConfigError: An option that the server cannot honour is switched on.

    Example:
        >>> from_keras_config({'class_name': 'SGD', 'config': {'learning_rate': 0.5}})
        SGD(learning_rate=0.5, momentum=0.0, nesterov=False)
    """
    return optimizer_from_config(
        config,
        _CLASSES,
        where="on the server",
        hint="leave {option!r} out, or let the workers optimize (rule='bsp' or 'dynsgd')",
    )
