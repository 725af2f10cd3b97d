"""Compile settings of a Keras model: given apart, asked of a compiled one, wanted by a rule."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import keras

from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.signature import has_own
from sparkdl.learner.state.optimizer_state import batch_counter

Json = Any
"""What :mod:`json` can write."""


def model_from_json(config: str, custom_objects: dict[str, Any]) -> Any:
    """A model with new weights from ``model.to_json()``; nothing in the text can run code.

    Raises:
        ModelError: Keras cannot make a model of it.
    """
    try:
        with keras.saving.custom_object_scope(custom_objects):
            return keras.models.model_from_json(config)
    except Exception as error:
        raise ModelError(
            "this text describes no Keras model",
            expected="model.to_json(), and custom_objects for what does not come with Keras",
            received=f"{type(error).__name__}: {str(error)[:300]}",
        ) from error


def require_trainable(model: keras.Model) -> None:
    """Raises ModelError for a model of which a step changes nothing: all of it is frozen."""
    if not model.trainable_variables and not has_own(model, "train_step"):
        raise ModelError(
            f"model {model.name!r} has nothing to train",
            expected="a variable that is trainable, or a train_step of the model's own",
            received=f"{len(model.variables)} variables, none of them trainable",
            hint="layer.trainable = True, and compile again; evaluate and predict need neither",
        )


def compile_model(
    model: keras.Model,
    optimizer: keras.Optimizer,
    loss: object,
    metrics: object,
    loss_weights: object = None,
) -> None:
    """Compiles a model in place.

    Args:
        model: A ``keras.Model``, compiled before or not.
        optimizer: A name or an optimizer that no other model has; None for Keras' default.
        loss: See ``keras.Model.compile``.
        metrics: See ``keras.Model.compile``; None for none.
        loss_weights: See ``keras.Model.compile``; None for none.

    Raises:
        ModelError: Keras knows no such optimizer, loss or metrics.
    """
    try:
        model.compile(
            optimizer="rmsprop" if optimizer is None else optimizer, loss=loss, metrics=metrics,
            loss_weights=loss_weights,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"model {model.name!r} cannot be compiled",
            expected="an optimizer, a loss and a list of metrics: names of Keras', or objects",
            received=f"optimizer={optimizer!r}, loss={loss!r}, metrics={metrics!r}"[:400]
            + f": {str(error)[:300]}",
            hint="metrics=['accuracy'] is a list of one" if isinstance(metrics, str) else "",
        ) from error


def set_learning_rate(model: keras.Model, rate: float) -> None:
    """Gives the optimizer of a compiled model another learning rate.

    Raises:
        ModelError: The learning rate follows a schedule.
    """
    schedule = getattr(model.optimizer, "_learning_rate", None)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        raise ModelError(
            f"the learning rate of model {model.name!r} follows a schedule",
            expected="an optimizer with a fixed learning rate, or no learning rate apart from it",
            received=f"{type(schedule).__name__}, and the learning rate {rate:g}",
        )
    model.optimizer.learning_rate = rate


def plain_form(value: object) -> Json | None:
    """A name, an optimizer, a loss or metrics as JSON; None if code of the user's is in it."""
    try:
        config = keras.saving.serialize_keras_object(value)
    except Exception:
        return None
    return config if _is_plain(config) else None


def from_plain_form(config: Json) -> Any:
    """A new object each time; the counterpart of :func:`plain_form`.

    Raises:
        ModelError: Keras makes nothing of it.
    """
    try:
        return keras.saving.deserialize_keras_object(copy.deepcopy(config), safe_mode=True)
    except (TypeError, ValueError) as error:
        raise ModelError(
            "this configuration describes no object of Keras",
            expected="what keras.optimizers.serialize(optimizer) gives, or the like of losses and "
            "metrics",
            received=f"{str(config)[:200]}: {str(error)[:300]}",
        ) from error


def copy_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Callbacks of the same state, which belong to no model.

    Raises:
        Exception: One of them cannot be copied; what :mod:`copy` raises.
    """
    models = (getattr(callback, "_model", None) for callback in callbacks)
    apart = {id(model): None for model in models if model is not None}
    return copy.deepcopy(list(callbacks), apart)


def _is_plain(config: Json) -> bool:
    if isinstance(config, dict):
        if "class_name" in config and not str(config.get("module", "")).startswith("keras"):
            return False
        return all(_is_plain(value) for value in config.values())
    if isinstance(config, (list, tuple)):
        return all(_is_plain(value) for value in config)
    return config is None or isinstance(config, (str, int, float, bool))


def adopt_optimizer(model: keras.Model, wanted: dict[str, Any] | None) -> None:
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
    batch_counter(fresh).assign(batch_counter(present))
    model.optimizer = fresh
    model._compile_config.config["optimizer"] = fresh  # which goes into the model's archive
    model.train_function = None
