"""Gradients on their way between a model's ``train_step`` and its optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.framework import overlaid
from sparkdl.learner.state.model_weights import is_overwritten
from sparkdl.learner.state.optimizer_state import innermost_optimizer, optimizers_within
from sparkdl.training.learning import Reducer

Array = npt.NDArray[Any]


@contextlib.contextmanager
def captured_gradients(model: keras.Model, share: object = None) -> Iterator[list[tuple[Any, Any]]]:
    """Within, a model's optimizer takes no step: ``(gradient, variable)`` pairs are listed instead.

    Keras calls ``stateless_apply`` on JAX and ``apply`` on the other backends.

    Args:
        model: Compiled.
        share: The part of all workers' rows that the batch is. The backward pass computes the
            gradient of that part of the mean over all rows, as one process would: what float8
            layers keep of it is the gradient. Listed is that of the mean over the batch. None: 1.
    """
    captured: list[tuple[Any, Any]] = []
    optimizer = model.optimizer
    scale = optimizer.scale_loss

    def scale_loss(loss: object) -> Any:
        scaled = scale(loss)
        return scaled if share is None else scaled * keras.ops.cast(share, scaled.dtype)

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = trainable_variables
        if variables is None:
            variables = optimizer._trainable_variables
        captured.extend((_divided(g, v, share), v) for g, v in zip(grads, variables, strict=True))

    def stateless_apply(
        optimizer_variables: object, grads: Sequence[Any], trainable_variables: object
    ) -> tuple[Any, Any]:
        apply(grads)
        return trainable_variables, optimizer_variables

    with overlaid(optimizer, apply=apply, stateless_apply=stateless_apply, scale_loss=scale_loss):
        yield captured


def _divided(gradient: Any, variable: keras.Variable, share: Any) -> Any:
    if gradient is None or share is None or is_overwritten(variable):
        return gradient
    if hasattr(gradient, "dense_shape"):  # slices of TensorFlow
        return type(gradient)(gradient.values / share, gradient.indices, gradient.dense_shape)
    return gradient / keras.ops.cast(share, gradient.dtype)


def overwriting(captured: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The overwritten variables, each with the gradient that takes its place."""
    return [(v, g) for g, v in captured if is_overwritten(v) and g is not None]


def largest_of_all(mine: Sequence[Array], row: int | None, reducer: Reducer) -> list[Array]:
    """The largest values of all workers with a batch, which are those of all rows.

    Args:
        mine: This worker's values of the overwritten variables. A scale is the same on all workers.
        row: This worker's number; None without a batch.
        reducer: Adds up; so each worker has a row of its own.
    """
    own = np.concatenate([[1.0], *(value.ravel() for value in mine)])
    table = np.zeros((reducer.num_workers, own.size))
    if row is not None:
        table[row] = own
    table = reducer.add_up(table.ravel()).reshape(table.shape)
    taken = table[table[:, 0] > 0, 1:] if table[:, 0].any() else own[None, 1:]
    parts = np.split(taken.max(axis=0), np.cumsum([value.size for value in mine])[:-1])
    pairs = zip(parts, mine, strict=True)
    return [part.reshape(value.shape).astype(value.dtype) for part, value in pairs]


def match_gradients(
    model: keras.Model, captured: Iterable[tuple[Any, Any]], trained: Iterable[Any]
) -> list[Any]:
    """The gradient of each variable of ``trained``, None where it has none.

    Args:
        captured: ``(gradient, variable)`` pairs that ``train_step`` gave to the optimizer.
        trained: The variables, in the layout's order.

    Raises:
        ModelError: ``train_step`` did not step the model's optimizer exactly once.
    """
    found: dict[int, Any] = {}
    steps = 0
    for gradient, variable in captured:
        steps = max(steps, 2 if id(variable) in found else 1)
        found[id(variable)] = gradient
    if steps != 1:
        raise ModelError(
            f"the train_step of model {model.name!r} has no gradient to exchange",
            expected="one step of model.optimizer per batch",
            received="none" if steps == 0 else "several",
            hint="a custom train_step like this trains in the modes that exchange weights: "
            "mode='asynchronous', or a frequency above one batch",
        )
    return [found.get(id(variable)) for variable in trained]


def gradients_to_apply(
    model: keras.Model,
    gradients: Iterable[Any],
    trained: Iterable[Any],
    has_gradient: Iterable[bool],
) -> tuple[list[Any], list[Any]]:
    """Gradients and variables for ``model.optimizer.apply``.

    An optimizer leaves out variables without a gradient, with a warning. A ``MultiOptimizer``
    wants all of them, with None for these.

    Args:
        model: Whose optimizer it is.
        gradients: The gradient of each variable; without a meaning where it has none.
        has_gradient: Whether a variable has one.
    """
    wants_all = bool(optimizers_within(innermost_optimizer(model)))
    pairs = [
        (gradient if has else None, variable)
        for gradient, variable, has in zip(gradients, trained, has_gradient, strict=True)
        if has or wants_all
    ]
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
