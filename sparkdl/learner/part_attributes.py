"""Attributes of layers, losses, metrics and optimizers, to find what no configuration has.

Two models that should be equal are compared part by part. Only values that can be told apart are
looked at: numbers, texts, arrays, containers of these, functions by their code, and objects of a
few such attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras

from sparkdl.learner.custom_objects import comes_with_keras, compile_settings
from sparkdl.learner.unsaved_settings import parts_of
from sparkdl.learner.value_forms import UNKNOWN, form_of

_NO_SETTINGS = frozenset({
    "name", "built", "compiled", "stop_training", "stop_evaluating", "stop_predicting",
    "supports_jit", "supports_masking", "loss",
    "train_function", "test_function", "predict_function", "input_names", "output_names",
    "training", "stateful", "is_adapted", "is_gptq_calibrated", "is_awq_calibrated",
    "build_config",
})  # fmt: skip
"""Attributes of Keras that follow from how far a model is built, or from its configuration."""
_SETTINGS = frozenset({"_run_eagerly", "_jit_compile", "_fn_kwargs"})
"""Settings of Keras that begin with an underscore, and not all are in a configuration: arguments of
a loss or a metric are there (``delta`` of Huber, ``axis`` of CosineSimilarity)."""


@dataclass(frozen=True)
class ComparedPart:
    """What can be compared of one layer, loss, metric or optimizer.

    Args:
        thing: The object itself; None in what is kept of a model.
        label: For messages.
        kind: Its class, in words.
        own: Whether the class is the user's.
        attributes: Name -> a form of the value that equal values share.
    """

    thing: Any
    label: str
    kind: str
    own: bool
    attributes: Mapping[str, Any]

    def kept(self) -> ComparedPart:
        """The same without the object."""
        return ComparedPart(None, self.label, self.kind, self.own, self.attributes)


def compared_parts(model: Any) -> list[ComparedPart]:
    """The layers of a model, what it was compiled with, and its optimizers, in one order."""
    things = [("layer", thing) for thing in parts_of(model)]
    settings = compile_settings(model)
    for name in ("loss", "metrics", "weighted_metrics"):
        given = settings.get(name)
        found = [] if given is None else keras.tree.flatten(given)
        kinds = (keras.losses.Loss, keras.metrics.Metric)
        things += [(name.rstrip("s"), thing) for thing in found if isinstance(thing, kinds)]
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        things.append(("optimizer", optimizer))
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return [_part(what, thing) for what, thing in things]


def _part(what: str, thing: Any) -> ComparedPart:
    kind, own = type(thing), not comes_with_keras(type(thing))
    attributes = {
        name: form_of(value)
        for name, value in list(vars(thing).items())
        if not _is_inner(name, kind) and name not in _NO_SETTINGS
    }
    attributes = {name: form for name, form in attributes.items() if form is not UNKNOWN}
    name = getattr(thing, "name", None) or kind.__name__
    label = f"{what} {name!r}" if what != "optimizer" else f"optimizer {kind.__name__}"
    return ComparedPart(thing, label, f"{kind.__module__}.{kind.__qualname__}", own, attributes)


def _is_inner(name: str, kind: type) -> bool:
    """Whether Keras itself keeps the attribute, as part of how it works."""
    if name in _SETTINGS:
        return False
    if name.startswith("__") or name in _attributes_of_keras():
        return name.startswith("_")
    return name.startswith("_") and comes_with_keras(kind)


@cache
def _attributes_of_keras() -> frozenset[str]:
    """What every layer, model, loss, metric and optimizer has."""
    model = keras.Model(inputs := keras.Input((1,)), keras.layers.Identity()(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    things = (
        keras.Layer(), model, keras.Sequential(), keras.losses.Loss(), keras.metrics.Mean(),
        keras.optimizers.SGD(),
    )  # fmt: skip
    return frozenset(name for thing in things for name in vars(thing))
