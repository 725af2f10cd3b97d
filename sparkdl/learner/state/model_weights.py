"""A Keras model's variables as one flat buffer: in which order, what is in it, reading, writing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import keras
import numpy as np

from sparkdl.errors import ModelError
from sparkdl.learner.preprocessing import preprocessor_of
from sparkdl.learner.signature import has_own
from sparkdl.weights import FloatArray, Layout

Orders = dict[str, list[str]]
"""Place of a list or dict in a model's layers -> what the things in it are called, in its order."""
_IN_SET = "{}"
"""Stands behind the name of an attribute that is a set."""
_TRACKED = (
    "_trainable_variables", "_non_trainable_variables", "_seed_generators", "_layers", "_metrics",
)  # fmt: skip


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


def exchanged_variables(model: keras.Model) -> list[Any]:
    """The variables of the flat buffer, in its order."""
    return [*trained_variables(model), *averaged_variables(model)]


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
    values = (np.asarray(v.numpy(), np.float32) for v in exchanged_variables(model))
    return layout.flatten(list(values))


def write_model(model: keras.Model, layout: Layout, flat: FloatArray) -> None:
    """Sets a model's variables from one flat buffer."""
    for variable, value in zip(exchanged_variables(model), layout.views(flat), strict=True):
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


def orders_of(model: keras.Model) -> Orders:
    """The order of what the layers of a model hold: by attributes, places in lists, keys of dicts.

    Names that Keras gives are left out, so that equal models have equal orders.
    """
    return {place: names for place, _, names in held_in_order(model)}


def held_in_order(model: keras.Model) -> Iterator[tuple[str, Any, list[str]]]:
    """Place, list or dict, and the names of what is in it, all different.

    The list of a layer's layers may be put in order before the next is asked for.

    Raises:
        ModelError: A set holds several of them, whose order is another in each process.
    """
    waiting, seen = [("", model)], {id(preprocessor_of(model))}  # which makes its own when called
    while waiting:
        path, layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        lists = {name: getattr(layer, name) for name in _TRACKED if getattr(layer, name)}
        names, dicts = _attributes_with(layer, {id(t) for things in lists.values() for t in things})
        for place, found in dicts.items():
            yield f"{path}{place}", found, [_key(key) for key in found]
        for tracked, things in lists.items():
            count, told = Counter[str](), []
            for thing in things:
                kind = thing.name if isinstance(thing, keras.Variable) else type(thing).__name__
                name = names.get(id(thing)) or re.sub("_[0-9]+$", "", f"the {kind}")
                told.append(f"{name} {count[name]}" if count[name] else name)
                count[name] += 1
                if count[name] > 1 and _IN_SET in name:
                    raise ModelError(
                        f"model {model.name!r} would be another one on the workers",
                        expected="layers and variables in a list or a dict",
                        received=f"{layer.name}.{name.split(_IN_SET)[0]}, a set of several: in "
                        "each process their order is another",
                    )
            yield f"{path}{tracked}", things, told
        waiting += [(f"{path}{i}.", inner) for i, inner in enumerate(layer._layers)]


def _attributes_with(
    layer: keras.Layer, held: set[int]
) -> tuple[dict[int, str], dict[str, dict[Any, Any]]]:
    """The attribute, place in a list or key of each thing of ``held``; the dicts among them."""
    names, dicts = dict[int, str](), dict[str, dict[Any, Any]]()

    def look(name: str, value: object) -> bool:
        if id(value) in held:
            names.setdefault(id(value), name)
            return True
        inside: list[tuple[str, object]] = []
        if isinstance(value, dict):
            inside = [(f"[{_key(key)}]", inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            inside = [(f"[{i}]", inner) for i, inner in enumerate(value)]
        elif isinstance(value, (set, frozenset)):
            inside = [(_IN_SET, inner) for inner in value]
        has = [look(f"{name}{place}", inner) for place, inner in inside]
        if any(has) and isinstance(value, dict) and len(dict(inside)) == len(inside):
            dicts[name] = value
        return any(has)

    attributes = {**vars(layer), **vars(layer).get("_modules", {})} if held else {}
    for name in sorted(attributes.keys() - attributes_of_keras(), key=lambda n: (n[0] == "_", n)):
        look(name, attributes[name])
    return names, dicts


def _key(key: object) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


@cache
def attributes_of_keras() -> frozenset[str]:
    """The names of the attributes that Keras itself gives to layers, models and their parts."""
    model = keras.Model(inputs := keras.Input((1,)), keras.layers.Identity()(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    things = (
        keras.Layer(), model, keras.Sequential(), keras.losses.Loss(), keras.metrics.Mean(),
        keras.optimizers.SGD(),
    )  # fmt: skip
    names = {name for thing in things for name in vars(thing)}
    return frozenset(names | {"_torch_params"})  # which a layer gets with its first variable
