"""A Keras model's variables as one flat buffer: what is in it, reading it, writing it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from sparkdl.errors import ModelError
from sparkdl.learner.signature import has_own
from sparkdl.weights import FloatArray, Layout


def averaged_variables(model: keras.Model) -> list[Any]:
    """Running statistics: float variables made untrainable by their layer (not merely frozen)."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers(include_self=True, recursive=True):
        if isinstance(layer, keras.metrics.Metric):
            continue
        for variable in layer._non_trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                found[id(variable)] = variable
    return [v for v in model.non_trainable_variables if id(v) in found]


def overwritten_variables(model: keras.Model) -> list[Any]:
    """Variables that Keras calls trained and that are no weights: a gradient takes their place.

    These are the scales and largest values of float8 layers. A change of one means nothing, so they
    travel as a whole, beside the flat buffer.
    """
    return [v for v in model.trainable_variables if is_overwritten(v)]


def require_joined_steps(model: keras.Model, mean: bool, rule: str) -> None:
    """Refuses what no exchange of several workers makes as in one process.

    Args:
        model: Compiled.
        mean: Whether the workers' gradients become their mean; False: something else.
        rule: The rule of the run.

    Raises:
        ModelError: Float8 layers with a rule that is no mean of gradients, with an accumulation of
            gradients, or with a ``train_step`` of the model's own.
    """
    if not overwritten_variables(model):
        return
    steps = getattr(model.optimizer, "gradient_accumulation_steps", None)
    if not mean or steps or has_own(model, "train_step"):
        raise ModelError(
            f"model {model.name!r} has float8 layers, which several workers cannot train so",
            expected="the mean of the workers' gradients at each batch, no accumulation of "
            "gradients, and Keras' own train_step",
            received=f"rule {rule!r}, gradient_accumulation_steps={steps}, a train_step "
            f"{'of its own' if has_own(model, 'train_step') else 'of Keras'}",
            hint="num_workers=1 trains it as Keras does",
        )


def trained_variables(model: keras.Model) -> list[Any]:
    """The variables that the optimizer moves."""
    return [v for v in model.trainable_variables if not is_overwritten(v)]


def is_overwritten(variable: keras.Variable) -> bool:
    """Whether a step puts the variable's gradient in its place."""
    return bool(getattr(variable, "overwrite_with_gradient", False))  # as Keras asks


def layout_of(trained: Iterable[Any], averaged: Iterable[Any]) -> Layout:
    """The layout of a model's variables (anything with ``path``, ``shape`` and ``dtype``)."""
    return Layout.of(
        [(v.path, v.shape, str(v.dtype)) for v in trained],
        [(v.path, v.shape, str(v.dtype)) for v in averaged],
    )


def model_layout(model: keras.Model) -> Layout:
    """The layout of a built model, the same on the driver and on every worker."""
    return layout_of(trained_variables(model), averaged_variables(model))


def read_model(model: keras.Model, layout: Layout) -> FloatArray:
    """A model's variables as one flat buffer."""
    variables = [*trained_variables(model), *averaged_variables(model)]
    return layout.flatten([np.asarray(v.numpy(), np.float32) for v in variables])


def write_model(model: keras.Model, layout: Layout, flat: FloatArray) -> None:
    """Sets a model's variables from one flat buffer."""
    variables = [*trained_variables(model), *averaged_variables(model)]
    for variable, value in zip(variables, layout.views(flat), strict=True):
        if keras.backend.standardize_dtype(variable.dtype) == "float64":
            present = np.asarray(keras.ops.convert_to_numpy(variable.value))
            value = np.where(present.astype(np.float32) == value, present, value)
        variable.assign(value)


def constrained(trained: Iterable[Any], layout: Layout, flat: FloatArray) -> FloatArray:
    """Weights that hold the constraints of their variables, as Keras has them after each step.

    Changes of several workers that are added up, or a mean of their weights, need not hold them.

    Args:
        layout: Begins with them.
        flat: A buffer of the layout.

    Returns:
        ``flat`` itself where they change nothing, else a changed copy.
    """
    result = flat
    for variable, slot in zip(trained, layout.slots, strict=False):
        if variable.constraint is None:
            continue
        place = slice(slot.offset, slot.offset + slot.size)
        value = keras.ops.convert_to_tensor(flat[place].reshape(slot.shape), dtype=slot.dtype)
        held = np.asarray(keras.ops.convert_to_numpy(variable.constraint(value)), np.float32)
        if not np.array_equal(held.ravel(), flat[place]):
            result = flat.copy() if result is flat else result
            result[place] = held.ravel()
    return result
