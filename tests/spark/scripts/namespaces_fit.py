"""Driver on a machine of its own: the doctor, a fit in each mode, ``run``.

python namespaces_fit.py MASTER DRIVER_ADDRESS SERVER_ADDRESS RESULT.json
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable

import keras
import numpy as np
from pyspark.sql import SparkSession

import sparkdl


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def own_address(known: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((known, 9))  # sends nothing: the route says which address is one's own
        return str(probe.getsockname()[0])


def main() -> None:
    master, address, server, result = sys.argv[1:]
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", address)
        .config("spark.driver.bindAddress", "0.0.0.0")
        .config("spark.executor.memory", "512m")
        .config("spark.cores.max", "2")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], "float32")
    rows = [(a.tolist(), float(b)) for a, b in zip(x, y, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label float")
    report = sparkdl.doctor(
        spark, num_workers=2, timeout_s=30.0, server_bind="0.0.0.0", server_address=server
    )
    found: dict[str, Any] = {"doctor": report.to_dict(), "losses": {}, "weights": {}}
    ways: dict[str, dict[str, Any]] = {
        "asynchronous": {},
        "synchronous": {"port": "7300-7309", "server_bind": "0.0.0.0", "server_address": server},
        "allreduce": {"communicator": "builtin", "worker_port": "7310-7319"},
    }
    for mode, options in ways.items():
        spark_model = sparkdl.SparkModel(make_model(), mode=mode, num_workers=2, **options)
        history = spark_model.fit(frame, epochs=2, batch_size=16, verbose=0)
        found["losses"][mode] = history.history["loss"]
        found["weights"][mode] = [w.tolist() for w in spark_model.model.get_weights()]
    found["addresses"] = sparkdl.run(own_address, (address,), num_workers=2)
    with open(result, "w") as file:
        json.dump(found, file)
    spark.stop()


if __name__ == "__main__":
    main()
