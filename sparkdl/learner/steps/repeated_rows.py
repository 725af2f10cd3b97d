"""Whether a loss that code of the user's own computes is a mean or a sum over the rows of a batch.

Two workers that have the same rows are to take the gradient of one process that has these rows
twice. So before the first step of several workers one batch is compared with its rows repeated. For
models whose losses are all Keras' own, or this library's, there is nothing to ask.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src import backend

from sparkdl.errors import ModelError
from sparkdl.learner.checks.compile_parts import adds_loss
from sparkdl.learner.framework import replaced
from sparkdl.learner.signature import has_own
from sparkdl.training.learning import Arrays, BatchStack
from sparkdl.weights import FloatArray

_ROWS = 8
"""Rows that tell as much as a whole batch."""
_CLOSE, _CLOSE_IN_HALF = 1e-3, 3e-2
"""How far two equal gradients may be apart, as a share of them."""

Gradient = Callable[[BatchStack, FloatArray | None], FloatArray]
"""A batch, and a factor for each term of the loss that is no mean over rows -> its gradient."""


def has_own_loss(model: keras.Model) -> bool:
    """Whether code of the user's own computes a loss, or a part of it."""
    if has_own(model, "train_step", "compute_loss"):
        return True
    losses = keras.tree.flatten(model.loss)
    own_losses = any(callable(loss) and not _is_a_known_one(loss) for loss in losses)
    layers = model._flatten_layers(include_self=True)
    return own_losses or any(adds_loss(type(layer)) for layer in layers)


def _is_a_known_one(loss: object) -> bool:
    named = loss if inspect.isfunction(loss) else type(loss)
    if isinstance(loss, keras.losses.Loss) and hasattr(loss, "fn"):
        named = loss.fn
    return str(getattr(named, "__module__", "")).startswith(("keras.", "sparkdl."))


def takes_any_rows(model: keras.Model) -> bool:
    """Whether a model takes batches of any size."""
    return all(tensor.shape[0] is None for tensor in getattr(model, "inputs", None) or [])


def few_rows(model: keras.Model) -> int | None:
    """How many rows of a batch tell which terms the loss has; None where it takes all of them."""
    return 2 if takes_any_rows(model) else None


def sums_stay(
    gradient: Gradient, stack: BatchStack, counted: Sequence[bool], model: keras.Model
) -> bool:
    """Whether what Keras' losses sum up over rows is a sum in the whole loss, too.

    False: code of the user's own divides the sums by the rows.

    Args:
        gradient: Computes a gradient, and leaves the model as it was.
        stack: One batch.
        counted: For each term of the loss that is no mean over rows whether it has a denominator;
            otherwise it is a sum.
        model: For its dtypes, and the message.

    Raises:
        ModelError: The whole loss is a sum that Keras' losses do not know of, or both a sum and a
            mean.
    """
    count = min(_ROWS, stack.num_rows // stack.num_batches)
    rows = _with_arrays(stack, lambda array: array[:1, :count], count)
    as_sums = np.array([1.0 if c else 2.0 for c in counted], np.float32)
    with _without_chance():
        twice = gradient(_repeated(rows, 2), None)
        told = gradient(rows, as_sums if counted else None)
        half = any("16" in str(layer.compute_dtype) for layer in model._flatten_layers())
        limit = _CLOSE_IN_HALF if half else _CLOSE
        if _equal(told, twice, limit):
            return True
        plain = gradient(rows, None) if counted else told
        if not all(counted) and _equal(plain, twice, limit):
            return False
        thrice = gradient(_repeated(rows, 3), None)
    if not _equal(thrice - twice, twice - plain, limit):
        return True  # rows are compared with each other, or random: nothing can be told
    raise ModelError(
        f"the loss of model {model.name!r} is no mean over the rows of a batch, and the workers "
        "cannot tell what it is divided by",
        expected="code of your own whose losses are means over rows (or all sums of Keras' losses "
        "with reduction='sum')",
        received="a gradient that is %.4g times as long for rows that are repeated once"
        % (np.linalg.norm(twice) / max(float(np.linalg.norm(plain)), 1e-30)),
        hint="divide by keras.ops.shape(y_pred)[0], or write the sum as a keras.losses.Loss with "
        "reduction='sum'; mode='asynchronous' and one worker take the loss as it is",
    )


def _equal(a: FloatArray, b: FloatArray, limit: float) -> bool:
    size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return not np.isfinite(size) or float(np.linalg.norm(a - b)) <= limit * size


def _repeated(stack: BatchStack, times: int) -> BatchStack:
    return _with_arrays(
        stack, lambda array: np.concatenate([array] * times, axis=1), times * stack.num_rows
    )


def _with_arrays(stack: BatchStack, change: Callable[[Any], Any], num_rows: int) -> BatchStack:
    def changed(arrays: Arrays) -> Arrays:
        return {name: change(array) for name, array in arrays.items()}

    weights = None if stack.sample_weight is None else changed(stack.sample_weight)
    return BatchStack(changed(stack.x), changed(stack.y), weights, 1, num_rows)


class _Chance(threading.local):
    fixed = False


_CHANCE = _Chance()
_LOCK = threading.Lock()
_inside = 0
_drawn: dict[str, Callable[..., Any]] = {}


@contextlib.contextmanager
def _without_chance() -> Iterator[None]:
    """Within, what layers draw in this thread is the same for all rows.

    Keras asks for its functions at each draw. Other threads, which may train another model
    meanwhile, get what they ask for; the last thread that leaves puts the functions back.
    """
    global _inside
    with _LOCK:
        if not _inside:
            for name, fixed in _FIXED.items():
                _drawn[name] = getattr(backend.random, name)
                setattr(backend.random, name, _fixed_here(fixed, _drawn[name]))
        _inside += 1
    try:
        with replaced(_CHANCE, "fixed", True):
            yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                for name, function in _drawn.items():
                    setattr(backend.random, name, function)


def _fixed_here(fixed: Callable[..., Any], drawn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(drawn)
    def function(*arguments: object, **named: object) -> Any:
        return (fixed if _CHANCE.fixed else drawn)(*arguments, **named)

    return function


def _dropout(inputs: object, *_: object, **__: object) -> Any:
    return inputs


def _normal(
    shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: object = None
) -> Any:
    return keras.ops.full(shape, mean + 0.5 * stddev, dtype or backend.floatx())


def _uniform(
    shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: object = None
) -> Any:
    return keras.ops.full(shape, 0.5 * (minval + maxval), dtype or backend.floatx())


_FIXED: dict[str, Callable[..., Any]] = {
    "dropout": _dropout, "normal": _normal, "truncated_normal": _normal, "uniform": _uniform
}  # fmt: skip
