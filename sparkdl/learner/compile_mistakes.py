"""What is wrong with the loss or a metric that a model was compiled with, told by its name."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from sparkdl.errors import ModelError
from sparkdl.learner.custom_objects import comes_with_keras, compile_settings
from sparkdl.learner.signature import model_signature

_BY_SHAPE = {"loss": ("crossentropy", "ce"), "metric": ("accuracy", "acc")}
"""Names for which ``compile`` itself chooses by the shapes of labels and outputs."""
_LIBRARIES = ("keras", "tensorflow", "jax", "jaxlib", "torch", "numpy", "sparkdl")


def compile_mistake(model: Any, y: Mapping[str, Any], error: Exception) -> ModelError | None:
    """What Keras' error about one batch says of the model's loss or metrics.

    Args:
        model: Compiled.
        y: Output name -> anything with the ``shape`` of a batch of labels.
        error: Raised when Keras built the loss and the metrics for the batch.

    Returns:
        None if neither is to blame: the batch does not fit the model or a loss of Keras.
    """
    return _unknown_name(model) or _failed_part(model, y, error)


def _unknown_name(model: Any) -> ModelError | None:
    for kind, module, name in _names(model):
        if name.lower() in _BY_SHAPE[kind] or _knows(module, name):
            continue
        known = {n for n in (*module.ALL_OBJECTS_DICT, *_BY_SHAPE[kind]) if n.islower()}
        close = [repr(n) for n in difflib.get_close_matches(name.lower(), known)]
        return ModelError(
            f"model {model.name!r} is compiled with a {kind} that Keras does not know",
            expected=f"the name of a {kind} of Keras; your own as a function or object, unquoted",
            received=f"{kind} {name!r}",
            hint=f"did you mean {' or '.join(close)}?" if close else "",
        )
    return None


def _names(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Kind, module and name of what was given to ``compile`` by its name."""
    settings = compile_settings(model)
    losses, metrics = keras.src.losses, keras.src.metrics
    for argument, kind, module in (
        ("loss", "loss", losses), ("metrics", "metric", metrics),
        ("weighted_metrics", "metric", metrics),
    ):  # fmt: skip
        for thing in keras.tree.flatten(settings.get(argument)):
            if isinstance(thing, str):
                yield kind, module, thing


def _knows(module: Any, name: str) -> bool:
    """Whether Keras makes something of the name, also of one that the user has registered."""
    try:
        module.get(name)
    except Exception:
        return False
    return True


def _failed_part(model: Any, y: Mapping[str, Any], error: Exception) -> ModelError | None:
    """Blames the metric, or the loss of the user's own, in whose methods the error was raised."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    part = next((p for p in (f.f_locals.get("self") for f in frames) if _is_part(p)), None)
    own = part is not None and not comes_with_keras(getattr(part, "_fn", getattr(part, "fn", part)))
    is_metric = isinstance(part, keras.metrics.Metric)
    if part is None or not (is_metric or own):
        return None
    labels = ", ".join(f"{name} {tuple(array.shape[1:])}" for name, array in y.items())
    outputs = model_signature(model).outputs.values()
    shapes = ", ".join(f"{spec.name} {spec.shape}" for spec in outputs)
    return ModelError(
        f"{'metric' if is_metric else 'loss'} {part.name!r} of model {model.name!r} cannot be "
        "computed",
        expected=f"one that takes, for each row, labels {labels} and outputs {shapes}",
        received=f"{type(error).__name__}: {str(error)[:600]}",
        hint=_place_of(error) if own else
        "metrics such as AUC, Precision and Recall compare labels and outputs of one shape: with "
        "loss='categorical_crossentropy' labels are one-hot, also from a column of class numbers",
    )  # fmt: skip


def _place_of(error: Exception) -> str:
    """The user's own line that raised an error, as a hint."""
    places = [
        f"it was raised in {frame.f_code.co_name} ({frame.f_code.co_filename}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES
    ]
    return places[-1] if places else ""


def _is_part(thing: Any) -> bool:
    """Whether it is a loss or a metric, and not what Keras keeps them in."""
    is_one = isinstance(thing, (keras.losses.Loss, keras.metrics.Metric))
    return is_one and not type(thing).__module__.endswith("compile_utils")
