"""What benchmarks share: a network and its data (60,000 rows, 784-128-128-10), real data, tables.

The real data are MNIST (10,000 digits), a9a and text8 (English letters), where their files are.
"""

from __future__ import annotations

import gzip
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS, EPOCHS, BATCH = 60_000, 3, 64
LETTERS = 64
HERE = os.path.dirname(os.path.abspath(__file__))


def make_data(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 784 values and 10 classes from a noisy two-layer teacher (learned in 3 epochs to
    about 80 % by the network, so that a worse rule shows)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 784)).astype("float32")
    hidden = np.maximum(x @ rng.normal(size=(784, 32)).astype("float32") / 28, 0)
    logits = hidden @ rng.normal(size=(32, 10)).astype("float32")
    y = (logits + 0.3 * rng.normal(size=logits.shape)).argmax(1).astype("int32")
    return x, y


def make_model(optimizer: Any = None, seed: int = 1) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer or keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def start_spark(executors: int = 2) -> Any:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(f"local-cluster[{executors},1,2048]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "3g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.executorEnv.PYTHONPATH", os.pathsep.join([os.path.dirname(HERE), HERE]))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def make_frame(spark: Any, x: np.ndarray, y: np.ndarray, workers: int) -> Any:
    """An array<float> column and an int label, cached in ``workers`` partitions."""
    import pyarrow as pa

    offsets = np.arange(0, (len(x) + 1) * x.shape[1], x.shape[1], dtype="int32")
    features = pa.ListArray.from_arrays(pa.array(offsets), pa.array(x.ravel()))
    table = pa.table({"features": features, "label": pa.array(y)})
    step = max(1, (16 << 20) // x[0].nbytes)  # a batch is a task, which the JVM serializes whole
    slices = [batch for n in range(0, len(x), step) for batch in table.slice(n, step).to_batches()]
    frame = spark.createDataFrame(pa.Table.from_batches(slices)).repartition(workers).cache()
    frame.count()
    return frame


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def median(values: list[float]) -> float:
    return statistics.median(values)


# -- real data ------------------------------------------------------------------------------------


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


def text8() -> tuple[Any, Any, Any, Any]:
    """Pieces of 64 letters of English text, x (n, 64), and y the letter after each; the last tenth
    of the text is the test."""
    where = folder()
    assert where is not None
    with gzip.open(where / "text8-head.txt.gz", "rt") as file:
        _, letters = np.unique(list(file.read()), return_inverse=True)
    pieces = (len(letters) - 1) // LETTERS
    x, y = (
        letters[start : start + pieces * LETTERS].astype("int32").reshape(pieces, LETTERS)
        for start in (0, 1)
    )
    train = pieces * 9 // 10
    order = np.random.default_rng(0).permutation(train)
    return x[:train][order], y[:train][order], x[train:], y[train:]


def text8_model(seed: int = 7) -> Any:
    """A causal Transformer of two blocks, 64 wide."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(seed)
    letters = keras.Input((LETTERS,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(letters), axis=1) - 1
    hidden = layers.Embedding(32, 64)(letters) + layers.Embedding(LETTERS, 64)(places)
    for _ in range(2):
        normal = layers.LayerNormalization()(hidden)
        hidden += layers.MultiHeadAttention(4, 16)(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(hidden)
        hidden += layers.Dense(64)(layers.Dense(128, "gelu")(normal))
    model = keras.Model(letters, layers.Dense(32)(layers.LayerNormalization()(hidden)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def _split(x: Any, y: Any, train: int) -> tuple[Any, Any, Any, Any]:
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return x[:train], y[:train], x[train:], y[train:]
