"""What it costs to sort the rows of a partition by their content, as part of a fit of three epochs.

Fits with two workers and sorts of one worker's rows take turns; a worker sorts once, after reading.

    python benchmarks/row_order.py --repeats 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"60,000 rows of 784 floats": (60_000, 784), "400,000 rows of 16 floats": (400_000, 16)}
WORKERS = 2


def make_frame(spark: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """The rows in memory, in more partitions than workers, so that each fit shuffles them."""
    import pyarrow as pa

    flat = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
    table = pa.table({"features": flat.cast(pa.list_(pa.float32())), "label": pa.array(y)})
    frame = spark.createDataFrame(table).repartition(4).cache()
    frame.count()
    return frame


def fit(frame: Any, width: int, mode: str) -> float:
    """Seconds of a fit of three epochs."""
    import keras

    from sparkdl import SparkModel

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy")
    spark_model = SparkModel(model, mode, num_workers=WORKERS, batch_size=64)
    began = time.perf_counter()
    spark_model.fit(frame, epochs=3, verbose=0)
    return time.perf_counter() - began


def sort(x: np.ndarray, y: np.ndarray) -> float:
    """Seconds to sort one worker's rows."""
    from sparkdl.data.rows import content_order

    began = time.perf_counter()
    content_order([x, y], len(x))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", default="asynchronous")
    asked = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = (
        builder.config("spark.log.level", "OFF").config("spark.driver.memory", "3g").getOrCreate()
    )
    for name, (rows, width) in SHAPES.items():
        generator = np.random.default_rng(0)
        x = generator.normal(size=(rows, width)).astype(np.float32)
        y = generator.integers(0, 10, rows).astype(np.int32)
        frame = make_frame(spark, x, y)
        fit(frame, width, asked.mode)  # workers have imported Keras then
        share = slice(0, rows // WORKERS)
        times = [
            (fit(frame, width, asked.mode), sort(x[share], y[share])) for _ in range(asked.repeats)
        ]
        fits, sorts = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{name}, {asked.mode}: a fit {fits:.2f} s, the sort {sorts:.3f} s: "
            f"{100 * sorts / fits:.1f} %",
            flush=True,
        )
        frame.unpersist()
    spark.stop()


if __name__ == "__main__":
    main()
