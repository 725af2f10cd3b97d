"""What tracking costs: the same fit without sinks and with the page, TensorBoard and JSON lines.

``python benchmarks/tracking.py``: fits alternate, each way ``--fits`` times, and the medians of
rows per second are compared. With ``--tabs`` so many streams of the page are read meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import urllib.request
from typing import Any

import keras
import numpy as np
from pyspark.sql import SparkSession

import sparkdl
from sparkdl import SparkModel
from sparkdl.tracking import JsonLines, TensorBoard


def read_stream(url: str) -> None:
    """Reads the events of the page until it ends, as a tab does."""
    base, _, query = url.partition("?")
    with urllib.request.urlopen(f"{base}api/events?{query}") as answer:
        for _ in answer:
            pass


def make_model() -> Any:
    """A perceptron on 784 pixels."""
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--tabs", type=int, default=1)
    given = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    random = np.random.default_rng(0)
    x = random.random((given.rows, 784), np.float32)
    y = random.integers(0, 10, given.rows)
    spark_model = SparkModel(make_model(), num_workers=2)
    speeds: dict[str, list[float]] = {"without": [], "with": []}

    def fit(way: str, sinks: list[Any]) -> None:
        spark_model.fit((x, y), epochs=given.epochs, verbose=0, sinks=sinks)
        summary = spark_model.summary
        assert summary is not None
        if way in speeds:
            speeds[way].append(given.epochs * summary.rows / summary.seconds)

    fit("first", [])
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.fits):
            for way in ("without", "with") if number % 2 else ("with", "without"):
                if way == "without":
                    fit(way, [])
                    continue
                with sparkdl.dashboard() as page:
                    tabs = [
                        threading.Thread(target=read_stream, args=(page.url,), daemon=True)
                        for _ in range(given.tabs)
                    ]
                    for tab in tabs:
                        tab.start()
                    fit(way, [JsonLines(f"{folder}/runs"), TensorBoard(f"{folder}/tb{number}")])
    without, tracked = (statistics.median(speeds[way]) for way in ("without", "with"))
    for way, found in speeds.items():
        print(f"{way:>8}: " + "  ".join(f"{speed:,.0f}" for speed in found) + " rows/s")
    pairs = [b / a for a, b in zip(speeds["without"], speeds["with"], strict=True)]
    print(f"with sinks and {given.tabs} tabs: {tracked / without:.3f} of the rows/s without, "
          f"median of pairs {statistics.median(pairs):.3f}")  # fmt: skip
    spark.stop()


if __name__ == "__main__":
    main()
