"""The network and data that the training benchmarks share (60,000 rows, 784-128-128-10)."""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

import numpy as np

ROWS, EPOCHS, BATCH = 60_000, 3, 64
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
