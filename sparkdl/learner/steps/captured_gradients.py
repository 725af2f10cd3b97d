"""Gradients on their way between a model's ``train_step`` and its optimizer, and its loss.

Keras shows what ``train_step`` returns. Workers add metric *variables* up, so a loss that is
returned but kept in no metric would stay at 0. A step made here puts it into the model's own loss
tracker, the mean over rows, unless the user's step has updated that tracker itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.signature import has_own
from sparkdl.learner.state.metric_state import shown_values
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

    # Not setattr: Keras' own would look at the functions as if they were variables.
    object.__setattr__(optimizer, "apply", apply)
    object.__setattr__(optimizer, "stateless_apply", stateless_apply)
    object.__setattr__(optimizer, "scale_loss", scale_loss)
    try:
        yield captured
    finally:
        object.__delattr__(optimizer, "apply")
        object.__delattr__(optimizer, "stateless_apply")
        object.__delattr__(optimizer, "scale_loss")


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


def logged_step(model: keras.Model, name: str) -> Callable[[Any], Any]:
    """The model's ``train_step`` or ``test_step``, whose loss reaches the loss tracker.

    Args:
        model: Compiled.
    """
    step: Callable[[Any], Any] = getattr(model, name)
    if has_own(model, "compute_metrics"):
        step = _shown_step(model, step)
    tracker = _tracker(model)
    if tracker is None or not has_own(model, name):
        return step

    def logged(data: object) -> Any:
        before = keras.ops.copy(tracker.count)
        logs = step(data)
        loss = _loss_of(logs)
        if loss is not None:
            untracked = keras.ops.cast(keras.ops.equal(tracker.count, before), "float32")
            tracker.update_state(loss, sample_weight=_rows(data) * untracked)
        return logs

    return logged


def _shown_step(model: keras.Model, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step that keeps what it shows beside metrics."""

    def shown(data: object) -> Any:
        logs = step(data)
        for value in shown_values(model):
            if isinstance(logs, dict) and value.name in logs:
                value.update_state(logs[value.name], _rows(data))
        return logs

    return shown


def stateless_logged_step(
    model: keras.Model, name: str, metrics_at: int
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The same for JAX, whose steps take the training state and return the next.

    Args:
        model: Compiled.
        metrics_at: Where the metric variables are in the state.
    """
    step: Callable[[Any, Any], tuple[Any, Any]] = getattr(model, name)
    if has_own(model, "compute_metrics"):
        step = _stateless_shown_step(model, step, metrics_at)
    tracker = _tracker(model)
    if tracker is None or not has_own(model, name):
        return step

    def logged(state: Any, data: object) -> tuple[Any, Any]:
        places = {id(v): i for i, v in enumerate(model.metrics_variables)}
        total_at, count_at = places[id(tracker.total)], places[id(tracker.count)]
        before = state[metrics_at][count_at]
        logs, after = step(state, data)
        loss = _loss_of(logs)
        if loss is None:
            return logs, after
        metrics = list(after[metrics_at])
        weight = _rows(data) * (metrics[count_at] == before)
        metrics[total_at] = metrics[total_at] + weight * keras.ops.mean(loss)
        metrics[count_at] = metrics[count_at] + weight
        return logs, (*after[:metrics_at], metrics, *after[metrics_at + 1 :])

    return logged


def _stateless_shown_step(
    model: keras.Model, step: Callable[[Any, Any], tuple[Any, Any]], metrics_at: int
) -> Callable[[Any, Any], tuple[Any, Any]]:
    def shown(state: object, data: object) -> tuple[Any, Any]:
        logs, after = step(state, data)
        pairs = list(zip(model.metrics_variables, after[metrics_at], strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:
            for value in shown_values(model):
                if isinstance(logs, dict) and value.name in logs:
                    value.update_state(logs[value.name], _rows(data))
        metrics = [scope.get_current_value(variable) for variable, _ in pairs]
        return logs, (*after[:metrics_at], metrics, *after[metrics_at + 1 :])

    return shown


def _tracker(model: keras.Model) -> Any:
    tracker = model._loss_tracker
    return tracker if any(metric is tracker for metric in model.metrics) else None


def _loss_of(logs: object) -> Any:
    return logs.get("loss") if isinstance(logs, dict) else None


def _rows(data: object) -> Any:
    first = keras.tree.flatten(data)[0]
    return keras.ops.cast(keras.ops.shape(first)[0], "float32")
