"""Values that a ``compute_metrics`` of the user's own shows beside the values of the model's
metrics.

Keras shows what it returned for the last batch. Workers add metric variables up, so each such value
has a metric here: on a worker's model as long as it lives, on the driver's while results are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras

from sparkdl.learner.signature import has_own
from sparkdl.learner.structure import arrange_batch
from sparkdl.training.learning import Arrays


class ShownValue(keras.metrics.Metric):  # type: ignore[misc]
    """The last of several values; of several workers their mean, weighted by rows."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, value: Any, rows: Any) -> None:
        """Takes the value that was shown after a batch of ``rows`` rows."""
        self.rows.assign_add(rows)
        self.total.assign(keras.ops.cast(value, self.total.dtype) * self.rows)

    def result(self) -> Any:
        return keras.ops.divide_no_nan(self.total, self.rows)


_found: WeakKeyDictionary[Any, list[ShownValue]] = WeakKeyDictionary()


def find_shown_values(
    model: keras.Model, x: Arrays, y: Arrays, sample_weight: Arrays | None
) -> None:
    """Finds the values from a batch; nothing for a model without a ``compute_metrics`` of its own.

    Args:
        model: Its metrics are built.
        x: By input.
        y: By output.
        sample_weight: By output, or None.
    """
    if model in _found or not has_own(model, "compute_metrics"):
        return
    inputs, labels, weights = arrange_batch(model, x, y, sample_weight)
    outputs = model(inputs, training=False)
    try:
        logs = model.compute_metrics(inputs, labels, outputs, sample_weight=weights)
        known = model.get_metrics_result()
    finally:
        model.reset_metrics()
    _found[model] = [
        ShownValue(name)
        for name, value in (logs or {}).items()
        if name not in known and getattr(value, "shape", ()) == ()
    ]


def shown_values(model: keras.Model) -> list[ShownValue]:
    """The metrics of the values that were found."""
    return _found.get(model, [])


def attach_shown_values(model: keras.Model) -> None:
    """Makes them metrics of the model."""
    present = model._metrics
    for value in shown_values(model):
        if not any(metric is value for metric in present):
            list.append(present, value)  # Keras' own list refuses it, for a model that is built


@contextlib.contextmanager
def shown_values_attached(model: keras.Model) -> Iterator[None]:
    """Within, they are metrics of the model."""
    before = list(model._metrics)
    attach_shown_values(model)
    try:
        yield
    finally:
        model._metrics[len(before) :] = []
