"""The mean of a partition's labels: what a model can answer that learns nothing from its inputs."""

from __future__ import annotations

import numpy as np

from sparkdl.data.rows import Rows

MOST_LOOKED_AT, MOST_VALUES = 1 << 14, 1000
"""Of more numbers (labels that are images have many in a row) those of some rows are looked at,
evenly spread; labels of more values or classes are not."""


def label_mean(rows: Rows) -> tuple[float, ...]:
    """The mean label of some rows, of a model with one output and without sample weights.

    Args:
        rows: The rows.

    Returns:
        For class numbers, given as such or as one-hot vectors: the part of the labels that each
        class has. For other labels: the mean of each value along their last axis. Empty where
        there is no such mean: no rows, several outputs, weights, text, too many values.
    """
    if len(rows.spec.labels) != 1 or rows.spec.weights or not rows.num_rows:
        return ()
    (spec,) = rows.spec.labels.values()
    stored = rows.sample(spec, rows.num_rows, MOST_LOOKED_AT)
    if stored is None:
        return ()
    classes = spec.num_classes
    if classes is not None:
        if classes > MOST_VALUES:
            return ()
        labels = stored.ravel().astype(np.int64)
        labels = labels if spec.ignored is None else labels[labels != spec.ignored]
        if not labels.size:
            return ()
        counts = np.bincount(labels, minlength=classes)
        return tuple((counts / labels.size).tolist())
    values = stored.reshape(len(stored), -1) if stored.ndim < 2 else stored
    if values.shape[-1] > MOST_VALUES:
        return ()
    return tuple(values.reshape(-1, values.shape[-1]).mean(0, dtype=np.float64).tolist())
