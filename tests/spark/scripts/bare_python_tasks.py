"""All whose tasks run Python of sparkdl, where ``python3`` of the PATH has no packages.

Usage: bare_python_tasks.py FOLDER; prints a line of JSON: what was asked -> what came of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from pyarrow import feather
from pyspark.mllib.regression import LabeledPoint
from pyspark.sql import SparkSession
from sparkdl.compat.elephas.utils.rdd_utils import lp_to_simple_rdd

import sparkdl
from sparkdl import SparkModel
from sparkdl.compat.tfos import TFCluster
from sparkdl.errors import ResourceError
from sparkdl.spark.mllib import from_labeled_point
from sparkdl.spark.tfrecord.files import read_whole_files

ROWS = 8
FOLDER = Path(sys.argv[1])


def outcome(action: Callable[[], Any]) -> Any:
    """What an action returns, or the kind of the error."""
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-800:]}"


def doubled(batches: Iterator[dict[str, Any]]) -> Iterator[Any]:
    for batch in batches:
        yield batch["id"] * 2


def shifted(args: int, ctx: Any) -> None:
    """A function of TensorFlowOnSpark: each element and ``args``."""
    feed = ctx.get_data_feed(False)
    while not feed.should_stop():
        batch = feed.next_batch(4)
        if batch:
            feed.batch_results([element + args for element in batch])


def summed(args: int, ctx: Any) -> None:
    feed = ctx.get_data_feed(True)
    while not feed.should_stop():
        feed.next_batch(4)


def predicted(spark: SparkSession) -> int:
    path = f"{FOLDER}/rows.arrow"
    table = pa.table({"features": [[float(i)] for i in range(ROWS)], "label": [0.0] * ROWS})
    feather.write_feather(table, path)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    spark_model = SparkModel(model)
    assert np.isfinite(spark_model.evaluate(path)["loss"])
    return len(spark_model.predict(path).collect())


def trained(spark: SparkSession) -> int:
    path = f"{FOLDER}/rows.tfrecord"
    rows = spark.createDataFrame(
        [(float(i), 0.0) for i in range(ROWS)], "features float, label float"
    )
    sparkdl.write_tfrecords(rows.coalesce(1), path)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    SparkModel(model, num_workers=1).fit(path, verbose=0)
    return sparkdl.read_tfrecords(spark, path).count()


def tfos(spark: SparkSession) -> list[int]:
    cluster = TFCluster.run(
        spark.sparkContext, shifted, 100, 1, input_mode=TFCluster.InputMode.SPARK
    )
    results = cluster.inference(spark.sparkContext.parallelize(range(ROWS), 2))
    cluster.shutdown()
    return [int(result) for result in results.map(lambda x: x + 1).collect()]


def tfos_training(spark: SparkSession) -> str:
    cluster = TFCluster.run(spark.sparkContext, summed, 0, 1, input_mode=TFCluster.InputMode.SPARK)
    cluster.train(spark.sparkContext.parallelize(range(ROWS), 2), 1)
    cluster.shutdown()
    return "trained"


def users_function(spark: SparkSession) -> str:
    """The error where the user's own function, which keeps ``python3``, has no packages."""
    rows = spark.range(ROWS).mapInPandas(lambda frames: frames, "id long")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        SparkModel(model, num_workers=1).fit(rows, features="id", label="id", verbose=0)
    except ResourceError as error:
        return str(error.received)
    return "trained"


def main() -> None:
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    points = spark.sparkContext.parallelize([LabeledPoint(i % 2, [i]) for i in range(ROWS)])
    asked: dict[str, Callable[[], Any]] = {
        "inference": lambda: [
            row.twice for row in sparkdl.inference(doubled, spark.range(3), "twice long").collect()
        ],
        "arrow": lambda: predicted(spark),
        "tfrecord": lambda: trained(spark),
        "whole files": lambda: read_whole_files(spark, f"{FOLDER}/rows.tfrecord").count(),
        "tfos inference": lambda: tfos(spark),
        "tfos training": lambda: tfos_training(spark),
        "labeled points": lambda: from_labeled_point(points)[1].tolist(),
        "user's function": lambda: users_function(spark),
        "elephas": lambda: lp_to_simple_rdd(points, categorical=True).getNumPartitions(),
    }
    print(json.dumps({name: outcome(action) for name, action in asked.items()}))
    spark.stop()


if __name__ == "__main__":
    main()
