"""The values that workers train on, read as in a fit but without one; shared by tests of files."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkdl.data.decode import decode
from sparkdl.learner.signature import model_signature
from sparkdl.spark.forms.files import FileInput
from sparkdl.spark.forms.opening import RowChoice, open_fit_source
from sparkdl.spark.forms.sources import Columns

N = 6
V = list(range(N))
PAIRS = ("x", "fixed", "matrix", "bytes")
"""Columns of two numbers in each row, the number of the row and the next."""


def linear(width: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


SIGNATURES = {width: model_signature(linear(width)) for width in (1, 2, 4)}


def trained(path: str, column: str, label: str = "id", width: int | None = None) -> np.ndarray:
    """The values of a column that two workers read of files, ordered by the label."""
    width = width or (2 if column in PAIRS else 1)
    columns = Columns(column, label)
    source = open_fit_source(path, RowChoice(SIGNATURES[width], columns, None, 0.0, 0))
    assert source.files is not None, "Spark reads them"
    files = FileInput.dealt(source.files, 2, 0.0, 0)
    decoded = [decode(b, source.spec) for rank in (0, 1) for b in files.batches(rank, source.spec)]
    labels = np.concatenate([next(iter(batch.y.values())).reshape(-1) for batch in decoded])
    rows = np.concatenate([next(iter(batch.x.values())) for batch in decoded])
    return rows[np.argsort(labels, kind="stable")]


def wanted(column: str) -> np.ndarray:
    """What the writers here and in ``write_samples.py`` put into a column."""
    values: dict[str, list[Any]] = {
        "f32": [v + 0.5 for v in V], "exact": [v / 4 for v in V], "flag": [v % 2 == 0 for v in V],
        "kind": [v % 2 for v in V], "part": [v % 2 for v in V],
    }  # fmt: skip
    given = [[v, v + 1] for v in V] if column in PAIRS else values.get(column, V)
    return np.array(given, np.float32).reshape(N, -1)
