"""Submitted to YARN: how soon something runs on the executors.

    spark-submit ... yarn_start.py RESULT.json FOLDER bare|fit

``bare``: a plain job whose two tasks import Keras. ``fit``: training, to the end of one epoch of
two steps. Writes the time at which the executors were done.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from pyspark.sql import SparkSession

ROWS = [([float(i), 1.0], float(i)) for i in range(8)]


def import_keras(batches: Iterator[object]) -> Iterator[object]:
    import keras

    assert keras.__version__
    yield from batches


def main() -> None:
    result, _, kind = sys.argv[1:]
    import keras  # both need it on the driver: a model is made there

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    spark = SparkSession.builder.appName(f"start {kind}").getOrCreate()
    schema = "features array<float>, label float"
    frame = spark.createDataFrame(ROWS, schema).repartition(2)
    if kind == "bare":
        frame.mapInArrow(import_keras, schema).collect()
    else:
        import sparkdl

        spark_model = sparkdl.SparkModel(model, num_workers=2)
        spark_model.fit(frame, epochs=1, batch_size=2, verbose=0)
    done = time.time()
    with open(result, "w") as file:
        json.dump({"done": done}, file)
    spark.stop()


if __name__ == "__main__":
    main()
