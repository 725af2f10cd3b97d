"""From a Keras optimizer's config dict to an optimizer on flat vectors. Keras is not imported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.optimizers.flat import (
    FlatAdagrad,
    FlatAdam,
    FlatAdamW,
    FlatOptimizer,
    FlatRMSprop,
    FlatSGD,
)

Made = TypeVar("Made", bound=FlatOptimizer)

FLAT_CLASSES = (FlatSGD, FlatAdagrad, FlatRMSprop, FlatAdam, FlatAdamW)
"""Every optimizer on flat vectors."""
# Entries of a config that do not change the step.
_HARMLESS = frozenset(
    {"name", "ema_momentum", "is_legacy_optimizer", "jit_compile", "is_scheduled"}
)
_SWITCHED_OFF = (None, False)


def optimizer_from_config(
    config: Mapping[str, Any],
    classes: Iterable[type[Made]],
    *,
    where: str,
    hint: str,
    beside: Collection[str] = (),
) -> Made:
    """The counterpart of a serialized Keras optimizer among ``classes``.

    Args:
        config: ``{'class_name': 'Adam', 'config': {...}}``, as ``keras.optimizers.serialize`` and
            ``{'class_name': type(o).__name__, 'config': o.get_config()}`` give it. A learning rate
            schedule becomes None: the caller's current learning rate.
        classes: Those to choose from, by the Keras class that each takes the steps of. Keras' Adam
            with weight decay becomes AdamW.
        beside: Options that the caller sees to.

    Raises:
        UnknownNameError: No such optimizer in ``classes``.
        ConfigError: An option that cannot be honoured is switched on.

    Example:
        >>> config = {'class_name': 'SGD', 'config': {'learning_rate': 0.5}}
        >>> optimizer_from_config(config, FLAT_CLASSES, where='here', hint='')
        FlatSGD(learning_rate=0.5, momentum=0.0, nesterov=False)
    """
    class_name = str(config.get("class_name", "")).rpartition(">")[2]
    known_classes = {cls.keras_class: cls for cls in classes}
    if class_name not in known_classes:
        raise UnknownNameError(f"optimizer {where}", class_name, known_classes)
    options = dict(config.get("config", {}))
    chosen = class_name
    if (
        class_name == "Adam"
        and options.get("weight_decay") is not None
        and "AdamW" in known_classes
    ):
        chosen = "AdamW"
    make = known_classes[chosen]
    known = {field.name for field in fields(make)}
    taken: dict[str, Any] = {}
    for option, value in options.items():
        if option == "learning_rate" and isinstance(value, Mapping):
            taken[option] = None
        elif option in known:
            taken[option] = value
        elif option not in _HARMLESS and option not in beside and value not in _SWITCHED_OFF:
            raise ConfigError(
                f"optimizer {class_name!r} {where}: option {option!r} is not supported",
                expected="options " + ", ".join(sorted(known)),
                received=f"{option}={value!r}",
                hint=hint.format(option=option),
            )
    return make(**taken)


def without_scaling(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the optimizer inside a ``LossScaleOptimizer``; of another one its own."""
    if str(optimizer.get("class_name", "")).rpartition(">")[2] != "LossScaleOptimizer":
        return optimizer
    inner: Mapping[str, Any] = optimizer["config"]["inner_optimizer"]
    return inner
