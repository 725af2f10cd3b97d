"""Elephas' predict, in Elephas' own virtual environment; started by inference.py. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import inference
import numpy as np
import workload
from elephas.spark_model import SparkModel


def main() -> None:
    part, rows = sys.argv[1], int(sys.argv[2])
    spark = workload.start_spark(inference.PROCESSES)
    model = inference.make_network() if part == "rows" else inference.make_cnn()
    model.compile("sgd", "categorical_crossentropy")
    shape = model.input_shape[1:]
    count = rows // inference.PROCESSES

    def make(number: int) -> list[np.ndarray]:
        rng = np.random.default_rng(number)
        return list(rng.normal(size=(count, *shape)).astype("float32"))

    numbers = spark.sparkContext.parallelize(range(inference.PROCESSES), inference.PROCESSES)
    rdd = numbers.flatMap(make).cache()
    rdd.count()
    spark_model = SparkModel(model, mode="synchronous")
    seconds = []
    for _ in range(2):  # the first imports TensorFlow on the executors
        started = time.perf_counter()
        predicted = spark_model.predict(rdd)
        seconds.append(time.perf_counter() - started)
    assert len(predicted) == count * inference.PROCESSES
    print("\nRESULT " + json.dumps({"seconds": seconds[-1]}), flush=True)
    os._exit(0)


main()
