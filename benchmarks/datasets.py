"""Real data for the learning benchmarks: MNIST (10,000 digits) and a9a, where their files exist."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np


def folder() -> Path | None:
    """``$SPARKDL_DATA``, or ``../shared/data`` beside the repository."""
    root = Path(__file__).resolve().parent.parent
    for path in (os.environ.get("SPARKDL_DATA"), root.parent / "shared" / "data"):
        if path and Path(path).is_dir():
            return Path(path)
    return None


def mnist() -> tuple[Any, Any, Any, Any]:
    """8,000 train and 2,000 test digits: x (n, 28, 28, 1) in [0, 1], y (n,)."""
    where = folder()
    assert where is not None
    with gzip.open(where / "mnist-10k-images-idx3-ubyte.gz") as file:
        x = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(where / "mnist-10k-labels-idx1-ubyte.gz") as file:
        y = np.frombuffer(file.read(), np.uint8, offset=8)
    return _split((x / 255).astype("float32"), y.astype("int32"), 8_000)


def a9a() -> tuple[Any, Any, Any, Any]:
    """26,000 train and 6,561 test rows of 123 binary features; y 0 or 1."""
    where = folder()
    assert where is not None
    with gzip.open(where / "a9a.libsvm.gz", "rt") as file:
        lines = file.read().splitlines()
    x = np.zeros((len(lines), 123), "float32")
    y = np.zeros(len(lines), "float32")
    for i, line in enumerate(lines):
        label, *features = line.split()
        y[i] = float(label) > 0
        x[i, [int(f.split(":")[0]) - 1 for f in features]] = 1
    return _split(x, y, 26_000)


def mnist_model(seed: int = 7) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def a9a_model(seed: int = 7) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((123,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def _split(x: Any, y: Any, train: int) -> tuple[Any, Any, Any, Any]:
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return x[:train], y[:train], x[train:], y[train:]
