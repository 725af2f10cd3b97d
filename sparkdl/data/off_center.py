"""How far a partition's inputs are from having mean 0, which slows asynchronous training down."""

from __future__ import annotations

import numpy as np

from sparkdl.data.columns import ColumnSpec
from sparkdl.data.rows import Rows

MOST_ROWS, MOST_VALUES = 256, 1 << 18
"""So many rows of an input are looked at, evenly spread; fewer where they have many values."""


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
    stored = rows.sample(spec, MOST_ROWS, MOST_VALUES)
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
