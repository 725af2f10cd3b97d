"""NumPy arrays as RDDs, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError
from sparkdl.mllib import from_labeled_point, from_vector, to_labeled_point, to_simple_rdd
from sparkdl.spark.session.interpreter import with_this_interpreter

__all__ = [
    "encode_label",
    "from_labeled_point",
    "lp_to_simple_rdd",
    "to_labeled_point",
    "to_simple_rdd",
]


def encode_label(label: float, nb_classes: int) -> npt.NDArray[np.float64]:
    """A class number as a one-hot vector ``(nb_classes,)``.

    Raises:
        DataError: It is no class.
    """
    if label != int(label) or not 0 <= label < nb_classes:
        raise DataError(
            "a label is no class",
            expected=f"a whole number from 0 to {nb_classes - 1}",
            received=str(label),
        )
    encoded = np.zeros(nb_classes)
    encoded[int(label)] = 1.0
    return encoded


def lp_to_simple_rdd(lp_rdd: Any, categorical: bool = False, nb_classes: int | None = None) -> Any:
    """An RDD of ``LabeledPoint`` as an RDD of pairs ``(x, y)``.

    Args:
        lp_rdd: The RDD.
        categorical: Labels become one-hot vectors.
        nb_classes: Their classes; None for one more than the greatest label, which takes a job.
    """
    if not categorical:
        return lp_rdd.map(lambda point: (from_vector(point.features), point.label))
    classes = nb_classes or _count_classes(lp_rdd)
    return lp_rdd.map(
        lambda point: (from_vector(point.features), encode_label(point.label, classes))
    )


def _count_classes(lp_rdd: Any) -> int:
    """One more than the greatest label; a job finds it."""
    greatest = lp_rdd.mapPartitions(lambda points: [max((p.label for p in points), default=-1)])
    return int(max(with_this_interpreter(greatest).collect(), default=-1)) + 1
