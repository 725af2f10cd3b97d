"""The optimizer that a rule wants its workers to train with."""

from __future__ import annotations

from typing import Any

import keras

from sparkdl.errors import ConfigError


def adopt_optimizer(model: Any, wanted: dict[str, Any] | None) -> None:
    """Gives ``model`` the optimizer options that a rule asks for; the learning rate stays.

    The options are such as the momentum of SGD. An optimizer that has them already stays, with its
    state; otherwise the model gets a new optimizer of the same class.

    Args:
        model: Compiled and built; changed in place.
        wanted: ``Rule.local_optimizer()``: ``{'class_name': ..., 'config': {...}}``; None asks for
            nothing.

    Raises:
        ConfigError: The model was compiled with an optimizer of another class.
    """
    if wanted is None:
        return
    present = model.optimizer
    name, options = wanted["class_name"], wanted["config"]
    described = ", ".join(f"{key}={value!r}" for key, value in options.items())
    if type(present) is not getattr(keras.optimizers, name):
        raise ConfigError(
            "the rule needs an optimizer of its own on the workers",
            expected=f"a model compiled with keras.optimizers.{name}(learning_rate, {described})",
            received=type(present).__name__,
            hint=f"compile it with {name}; rule='aeasgd' works with every optimizer",
        )
    config = present.get_config()
    if all(config[key] == value for key, value in options.items()):
        return
    fresh = type(present).from_config({**config, **options})
    fresh.build(model.trainable_variables)
    fresh.iterations.assign(present.iterations)
    model.optimizer = fresh
    model._compile_config.config["optimizer"] = fresh  # which goes into the model's archive
    model.train_function = None
