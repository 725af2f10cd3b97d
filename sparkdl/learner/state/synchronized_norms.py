"""``BatchNormalization(synchronized=True)`` is followed by several workers, or refused.

Followed, the mean and the variance of a channel are those of the rows of all workers in this step
(:class:`sparkdl.learner.steps.tensorflow_exchange.SynchronizedMoments`). A call of
``keras.ops.moments(synchronized=True)`` in code of the user's own is refused.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import keras

from sparkdl.errors import ConfigError
from sparkdl.learner.framework import replaced
from sparkdl.learner.signature import model_signature, traced
from sparkdl.learner.structure import arrange_inputs

_INSTALLED = ("-packages", sysconfig.get_path("stdlib"))
_CALL = "keras.ops.moments(synchronized=True)"


def synchronized_layers(model: keras.Model) -> list[Any]:
    """The layers of a model that normalise by the rows of all workers while they train."""
    return [
        layer
        for layer in model._flatten_layers(include_self=False, recursive=True)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.synchronized
        and layer.trainable
    ]


def require_synchronized(model: keras.Model, num_workers: int, way: str, *, followed: bool) -> None:
    """Refuses a model whose layers would normalise by the rows of one worker alone.

    Args:
        model: Built.
        num_workers: Workers that train it; one has all rows.
        way: How they train, for the message.
        followed: Whether each of its steps is one of all workers together, from the first layer on.

    Raises:
        ConfigError: Nobody can follow a layer's ``synchronized=True``.
    """
    layers = synchronized_layers(model) if num_workers > 1 else []
    if num_workers > 1 and calls_moments(model):
        raise _refusal(f"a layer of model {model.name!r}", num_workers, f"a call of {_CALL}")
    if not layers:
        return
    where, reason = layers[0], way
    if keras.backend.backend() != "tensorflow":
        followed, reason = False, f"backend {keras.backend.backend()!r}, where Keras has none"
    for outer in model._flatten_layers(include_self=False, recursive=True):
        if isinstance(outer, (keras.layers.Wrapper, keras.layers.RNN)):
            inside = synchronized_layers(outer)
            if inside:  # it is called in a loop of its own
                where, followed = inside[0], False
                reason = f"a layer inside of {type(outer).__name__} {outer.name!r}"
    if followed:
        return
    raise _refusal(f"layer {where.name!r} of model {model.name!r}", num_workers, reason)


def calls_moments(model: keras.Model) -> bool:
    """Whether code of the user's own in a model has synchronized moments when it trains.

    Only a model whose code has the word is traced.
    """
    layers = list(model._flatten_layers())
    kinds = {k for layer in layers for k in type(layer).__mro__ if not _of_keras(k.__module__)}
    seen: set[int] = set()
    operations = [op for layer in layers for op in vars(layer).get("_operations", ())]
    if any(isinstance(op, keras.src.ops.nn.Moments) and op.synchronized for op in operations):
        return True
    values = [value for thing in (*layers, *kinds) for value in vars(thing).values()]
    if keras.backend.backend() != "tensorflow" or not any(_mentions(v, seen) for v in values):
        return False
    found, plain = [], keras.src.backend.nn.moments

    def moments(x: object, axes: object, keepdims: bool = False, synchronized: bool = False) -> Any:
        caller = sys._getframe(2).f_locals.get("self")  # behind keras.ops.moments
        found.append(synchronized and not isinstance(caller, keras.layers.BatchNormalization))
        return plain(x, axes, keepdims)

    specs = model_signature(model).inputs.values()
    given = {s.name: keras.KerasTensor((None, *(s.shape or ())), s.dtype) for s in specs}
    told = {"training": True} if model._call_has_training_arg else {}
    with replaced(keras.src.backend.nn, "moments", moments):
        traced(lambda x: model(x, **told), arrange_inputs(model, given))
    return any(found)


def _mentions(thing: object, seen: set[int]) -> bool:
    """Whether a function, or one of the user's that it calls by name, has the word ``moments``."""
    if not isinstance(thing, FunctionType) or id(thing) in seen or _of_keras(thing.__module__):
        return False
    seen.add(id(thing))
    codes = [thing.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    names = {name for code in codes for name in code.co_names}
    if "moments" in names or any(p in thing.__code__.co_filename for p in _INSTALLED):
        return "moments" in names
    values = [thing.__globals__.get(name) for name in names]
    for cell in thing.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            values.append(cell.cell_contents)
    for module in [value for value in values if isinstance(value, ModuleType)]:
        values += [vars(module).get(name) for name in names]
    return any(v is keras.ops.moments or _mentions(v, seen) for v in values)


def _of_keras(module: object) -> bool:
    return str(module).startswith("keras.")


def refuse_among_ranks(size: Callable[[], int]) -> None:
    """From now on synchronized moments are an error while there are several ranks.

    Args:
        size: Tells how many ranks of a user's own function there are.
    """
    plain = keras.src.backend.nn.moments
    if plain.__module__ == __name__:
        return

    def moments(x: object, axes: object, keepdims: bool = False, synchronized: bool = False) -> Any:
        if synchronized and size() > 1:
            raise _refusal("a layer", size(), "a training function of your own")
        return plain(x, axes, keepdims, synchronized=synchronized)

    keras.src.backend.nn.moments = moments


def _refusal(what: str, num_workers: int, reason: str) -> ConfigError:
    return ConfigError(
        f"{what} has synchronized=True, which {num_workers} workers cannot follow here",
        expected="BatchNormalization on TensorFlow, and mode='allreduce' or 'synchronous' with "
        "their own rules, an exchange at each batch, and on_nan='raise' or 'ignore'",
        received=reason,
        hint="synchronized=False normalises the batch of each worker; mode='allreduce' follows it",
    )
