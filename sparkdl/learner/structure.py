"""Named arrays <-> the structure (one tensor, a list or a dict) that a Keras model works with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from sparkdl.learner.signature import LABEL, distinct, list_names, takes_list
from sparkdl.training.learning import Arrays, BatchStack


def arrange_batch(
    model: keras.Model, x: Arrays, y: Arrays, sample_weight: Arrays | None
) -> tuple[Any, Any, Any]:
    """``(x, y, sample_weight)`` in the model's structure; None for labels and weights that are not
    there."""
    weights = None if sample_weight is None else arrange_targets(model, sample_weight)
    return arrange_inputs(model, x), arrange_targets(model, y) if y else None, weights


def arranged(model: keras.Model, stack: BatchStack) -> tuple[Any, Any, Any]:
    """The arrays of a stack as ``(x, y, sample_weight)``, see :func:`pack_batch`."""
    return arrange_batch(model, stack.x, stack.y, stack.sample_weight)


def pack_batch(x: object, y: object = None, sample_weight: object = None) -> Any:
    """The argument of ``train_step`` or ``predict_step`` as Keras' own loops pack it: ``x``,
    ``(x, y)`` or all three.

    A ``train_step`` of the user's own may count on that: ``x, y = data``.
    """
    if y is None:
        return (x,) if isinstance(x, (list, tuple)) else x
    return (x, y) if sample_weight is None else (x, y, sample_weight)


def arrange_inputs(model: keras.Model, x: Arrays) -> Any:
    """Puts named input arrays into the structure that a model's ``call`` takes."""
    struct = getattr(model, "_inputs_struct", None)
    if struct is None and takes_list(model):
        return [x[name] for name in list_names(len(x))]
    return arrange(x, struct, _names(model, "input"))


def arrange_targets(model: keras.Model, y: Arrays) -> Any:
    """Puts arrays by output name into the structure of the model's outputs."""
    if set(y) == {LABEL}:
        return y[LABEL]
    struct, names = getattr(model, "_outputs_struct", None), _names(model, "output")
    if isinstance(struct, (list, tuple)) and len(struct) > 1 and set(names) > set(y):
        return dict(y)  # as Keras takes the labels of some outputs only
    return arrange(y, struct, names)


def arrange(arrays: Arrays, struct: object, names: list[str]) -> Any:
    """Puts named arrays into the structure of ``struct``, whose leaves are called ``names``."""
    if len(arrays) == 1 and not isinstance(struct, dict):
        return next(iter(arrays.values()))
    if isinstance(struct, (list, tuple)) and set(names) == set(arrays):
        return [arrays[name] for name in names]
    return dict(arrays)


def name_outputs(
    model: keras.Model, outputs: object, value: Callable[[Any], Any] = keras.ops.convert_to_numpy
) -> Arrays:
    """A model's outputs as a dict by output name: of NumPy arrays, or what ``value`` makes."""
    if isinstance(outputs, dict):
        return {k: value(v) for k, v in outputs.items()}
    names = _names(getattr(model, "_functional", None) or model, "output")  # also of a Sequential
    if isinstance(outputs, (list, tuple)):
        if len(names) != len(outputs):
            names = [f"output_{i}" for i in range(len(outputs))]
        return {n: value(v) for n, v in zip(names, outputs, strict=True)}
    return {names[0] if names else "output": value(outputs)}


def map_arrays(function: Callable[[Any], Any], structure: object) -> Any:
    """``function`` of every array of a structure; None (absent sample weights) stays None."""
    return keras.tree.map_structure(lambda a: None if a is None else function(a), structure)


def _names(model: keras.Model, side: str) -> list[str]:
    tensors = getattr(model, f"_{side}s", None) or []
    names = getattr(model, f"{side}_names", None)
    return distinct(names or [getattr(t, "name", str(i)) for i, t in enumerate(tensors)])
