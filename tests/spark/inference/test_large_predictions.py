"""Predictions of a large model: exact, with the weights once in each executor's folder."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

import sparkdl


def shared_files(spark: Any) -> set[tuple[str, str, str, int]]:
    """The files of weights on all executors: path, modes of folder and file, size."""

    def here(_: int) -> list[tuple[str, str, str, int]]:
        home = os.environ["SPARK_LOCAL_DIRS"].split(",")[0]
        names = [name for name in os.listdir(home) if name.startswith("sparkdl-weights-")]
        folders = [os.path.join(home, name) for name in names]
        files = [(f, os.stat(f), os.stat(os.path.join(f, "weights"))) for f in folders]
        return [(f, oct(a.st_mode & 0o777), oct(b.st_mode & 0o777), b.st_size) for f, a, b in files]

    return set(spark.sparkContext.parallelize(range(8), 8).flatMap(here).collect())


def test_large_weights_lie_once_in_each_executor(spark: Any) -> None:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(3000), keras.layers.Dense(3000, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    frame = spark.createDataFrame([(float(v),) for v in x[:, 0]], "x float").repartition(4)
    before = shared_files(spark)
    rows = sparkdl.predict(model, frame, features="x", batch_size=16).collect()
    got = {row.x: row.prediction for row in rows}
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose([got[float(v)] for v in x[:, 0]], expected, atol=1e-5)
    new = shared_files(spark) - before
    assert 1 <= len(new) <= 2  # one for each of the two executors
    assert {(folder, file) for _, folder, file, _ in new} == {("0o700", "0o600")}
    assert all(size >= model.count_params() * 4 for *_, size in new)
