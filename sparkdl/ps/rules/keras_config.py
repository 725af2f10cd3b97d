"""From a Keras optimizer's config dict to the optimizer on the server. Keras is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.ps.rules.optimizer import SGD, Adagrad, Adam, AdamW, RMSprop, ServerOptimizer

_CLASSES: dict[str, type[ServerOptimizer]] = {
    "SGD": SGD,
    "Adagrad": Adagrad,
    "RMSprop": RMSprop,
    "Adam": Adam,
    "AdamW": AdamW,
}
# Entries of a config that say nothing about the step.
_HARMLESS = frozenset(
    {"name", "ema_momentum", "is_legacy_optimizer", "jit_compile", "is_scheduled"}
)
_SWITCHED_OFF = (None, False)


def from_keras_config(config: Mapping[str, Any]) -> ServerOptimizer:
    """The server's counterpart of a serialized Keras optimizer.

    Args:
        config: ``{'class_name': 'Adam', 'config': {...}}``, as ``keras.optimizers.serialize`` and
            ``{'class_name': type(o).__name__, 'config': o.get_config()}`` give it. A learning rate
            schedule becomes None: the worker's current learning rate.

    Raises:
        UnknownNameError: The server has no such optimizer.
        ConfigError: An option that the server cannot honour is switched on.

    Example:
        >>> from_keras_config({'class_name': 'SGD', 'config': {'learning_rate': 0.5}})
        SGD(learning_rate=0.5, momentum=0.0, nesterov=False)
    """
    class_name = str(config.get("class_name", "")).rpartition(">")[2]
    if class_name not in _CLASSES:
        raise UnknownNameError("optimizer on the server", class_name, _CLASSES)
    options = dict(config.get("config", {}))
    make = _CLASSES[class_name]
    if make is Adam and options.get("weight_decay") is not None:
        make = AdamW
    known = {field.name for field in fields(make)}
    taken: dict[str, Any] = {}
    for option, value in options.items():
        if option == "learning_rate" and isinstance(value, Mapping):
            taken[option] = None
        elif option in known:
            taken[option] = value
        elif option not in _HARMLESS and value not in _SWITCHED_OFF:
            raise ConfigError(
                f"optimizer {class_name!r} on the server: option {option!r} is not supported",
                expected="options " + ", ".join(sorted(known)),
                received=f"{option}={value!r}",
                hint=f"leave {option!r} out, or let the workers optimize (rule='bsp' or 'dynsgd')",
            )
    return make(**taken)
