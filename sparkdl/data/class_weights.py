"""``class_weight``: the weight of a row from the class of its label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sparkdl.data.columns import Batch, DataSpec
from sparkdl.data.ragged import Array


class ClassWeights:
    """Weighs the rows of a batch by their class, as ``class_weight`` of Keras' ``fit`` does.

    The class of a row is its label, rounded; of a label with several values (one-hot) the place
    of the largest. Where the loss takes class numbers, an array of them has a weight for each.

    Args:
        weights: Class -> weight; other classes weigh 1.
        spec: Of the rows; it has one output and no sample weights.
    """

    def __init__(self, weights: Mapping[int, float], spec: DataSpec) -> None:
        ((self._output, label),) = spec.labels.items()
        self._numbers = label.classes is not None
        self._classes = np.array(sorted(weights), np.int64)
        self._weights = np.array([weights[int(c)] for c in self._classes], np.float32)

    def weigh(self, batch: Batch) -> Batch:
        """The same rows with the weights of their classes as sample weights."""
        return replace(batch, sample_weight={self._output: self._of(batch.y[self._output])})

    def _of(self, labels: Array) -> Array:
        if labels.ndim > 1 and labels.shape[-1] == 1:
            labels = labels[..., 0]
        elif labels.ndim > 1 and not self._numbers:
            labels = labels.argmax(-1)
        classes = np.round(labels).astype(np.int64)
        places = np.searchsorted(self._classes, classes).clip(max=len(self._classes) - 1)
        known = self._classes[places] == classes
        found: Array = np.where(known, self._weights[places], np.float32(1))
        return found
