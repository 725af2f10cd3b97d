"""Statistics of a partition's rows: the mean of the labels, the distance of inputs from mean 0.

The mean label is the answer of a model that learns nothing from its inputs. Inputs far from mean 0
slow asynchronous training down.
"""

from __future__ import annotations

import numpy as np

from sparkdl.data.columns import ColumnSpec
from sparkdl.data.rows import Rows

_MOST_ROWS, _MOST_NUMBERS = 256, 1 << 18
"""Rows and numbers of an input that are looked at, evenly spread."""


def off_center(rows: Rows) -> dict[str, float]:
    """The part of each input's mean square that its mean makes up.

    Args:
        rows: The rows.

    Returns:
        Input name -> a number in [0, 1]: 0 for inputs with mean 0, 0.75 for numbers uniform in
        [0, 1), 1 for constants. 0 where nothing is known: no rows, or inputs that are whole
        numbers, text or of different lengths.
    """
    features = rows.spec.features
    return {
        name: _of_input(rows, spec) if rows.num_rows else 0.0 for name, spec in features.items()
    }


def _of_input(rows: Rows, spec: ColumnSpec) -> float:
    if "float" not in spec.dtype:
        return 0.0
    stored = rows.sample(spec, _MOST_ROWS, _MOST_NUMBERS)
    if stored is None or len(stored) < 2 or stored.dtype.kind not in "fiu":
        return 0.0
    count = len(stored)
    values = stored.reshape(count, -1).astype(np.float64)
    mean_square = float(np.square(values).sum(1).mean())
    if not 0 < mean_square < np.inf:
        return 0.0
    # the mean of a few rows is off by chance: by that part of what is left without it
    found = float(np.square(values.mean(0)).sum()) / mean_square
    return max(0.0, (count * found - 1) / (count - 1))


MOST_LOOKED_AT, MOST_VALUES = 1 << 14, 1000
"""At most this many label values are sampled, from evenly spread rows (images have many each). A
label with more values or classes than ``MOST_VALUES`` is not sampled."""


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
