"""The loss that a ``train_step`` of the user's own returns, for a model that does not track it.

Keras shows what ``train_step`` returns. Workers add metric *variables* up, so a loss that is
returned but kept in no metric would stay at 0. A step made here puts it into the model's own loss
tracker, the mean over rows, unless the user's step has updated that tracker itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from sparkdl.learner.signature import has_own
from sparkdl.learner.state.metric_state import shown_values


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
