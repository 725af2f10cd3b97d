"""Submitted to YARN: data on HDFS, a fit in each mode that is named, ``run``, the doctor.

    spark-submit ... yarn_fit.py RESULT.json FOLDER MODE [MODE ...] [logs]

Writes a JSON object to RESULT.json, which is on the file system that all nodes share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import keras
import numpy as np
from pyspark.sql import DataFrame, SparkSession

import sparkdl
from sparkdl.tracking import JsonLines, TensorBoard

EPOCHS = 3


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def where() -> tuple[str, str, str]:
    return sys.executable, os.getcwd(), sparkdl.__file__


def trained_plainly(x: np.ndarray, y: np.ndarray) -> list[Any]:
    """The weights that Keras alone reaches in this process, on the batches of both workers."""
    model = make_model()
    model.fit(x, y, epochs=EPOCHS, batch_size=len(x), shuffle=False, verbose=0)
    return [w.tolist() for w in model.get_weights()]


def log(spark_model: sparkdl.SparkModel, frame: DataFrame) -> dict[str, Any]:
    """Logs on HDFS, named with a scheme and without one; read back by the other name."""
    sinks = [
        JsonLines("/kept/runs"), JsonLines("hdfs:///kept/more-runs"),
        TensorBoard("hdfs:///kept/board"), TensorBoard("/kept/more-board"),
    ]  # fmt: skip
    spark_model.fit(frame, epochs=2, verbose=0, sinks=sinks)
    read = frame.sparkSession.read
    events = [
        sorted(row.event for row in read.json(folder).where("event = 'epoch_ended'").collect())
        for folder in ("hdfs:///kept/runs", "/kept/more-runs")
    ]
    files = read.format("binaryFile").option("recursiveFileLookup", "true")
    written = [
        files.load(folder).where("path like '%tfevents%' and length > 0").count()
        for folder in ("/kept/board", "hdfs:///kept/more-board")
    ]
    return {"epochs in lines": [len(one) for one in events], "boards": [n > 0 for n in written]}


def keep(spark_model: sparkdl.SparkModel, frame: DataFrame) -> dict[str, Any]:
    """Model and checkpoints on HDFS, written under one name of a place and read by the other."""
    spark_model.save(
        "hdfs:///kept/other.keras"
    )  # without the name node's address, as in docs/tour.md
    other = sparkdl.load_spark_model("/kept/other.keras")
    spark_model.save("/kept/model.keras")
    loaded = sparkdl.load_spark_model("hdfs:///kept/model.keras")
    spark_model.fit(frame, epochs=1, verbose=0, checkpoint_dir="/kept/checkpoints")
    again = sparkdl.SparkModel(make_model(), mode=spark_model.get_config()["mode"], num_workers=2)
    again.fit(
        frame, epochs=1, verbose=0, checkpoint_dir="hdfs:///kept/checkpoints", resume=True
    )  # one epoch is done: nothing is trained
    pairs = zip(again.model.get_weights(), spark_model.model.get_weights(), strict=True)
    restored = all(np.allclose(one, two) for one, two in pairs)
    again.fit(frame, epochs=1, verbose=0, checkpoint_dir="hdfs:///kept/more-checkpoints")
    scored = loaded.predict(frame)
    scored.write.mode("overwrite").parquet("/kept/scored")
    return {
        "model": [len(one.model.get_weights()) for one in (loaded, other)] == [4, 4],
        "checkpoints": restored,
        "scored": frame.sparkSession.read.parquet("hdfs:///kept/scored").count(),
    }


def main() -> None:
    result, modes = sys.argv[1], [one for one in sys.argv[3:] if one != "logs"]
    with_logs = "logs" in sys.argv[3:]
    spark = SparkSession.builder.appName("sparkdl on YARN").getOrCreate()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], "float32")
    rows = [(a.tolist(), float(b)) for a, b in zip(x, y, strict=True)]
    spark.createDataFrame(rows, "features array<float>, label float").write.mode(
        "overwrite"
    ).parquet("hdfs:///data/train.parquet")
    frame = spark.read.parquet("/data/train.parquet")  # no scheme: the cluster's file system
    found: dict[str, Any] = {
        "master": spark.sparkContext.master,
        "deploy_mode": spark.conf.get("spark.submit.deployMode"),
        "application": spark.sparkContext.applicationId,
        "driver_python": sys.executable,
        "losses": {},
        "weights": {},
        "seconds": {},
        "started": spark.sparkContext.startTime / 1e3,
    }
    found["doctor"] = sparkdl.doctor(
        spark, timeout_s=30.0, num_workers=2, checkpoint_dir="/kept/checkpoints",
        limits=sparkdl.Limits(memory_budget_mb=512),  # of an overhead of 2 GiB
    ).to_dict()  # fmt: skip
    for mode in modes:
        mode, _, communicator = mode.partition(":")
        options: dict[str, Any] = {"communicator": communicator} if communicator else {}
        began = time.time()
        spark_model = sparkdl.SparkModel(make_model(), mode=mode, num_workers=2, **options)
        # Every step takes all rows: the order in which a shuffle delivers them changes nothing.
        history = spark_model.fit(frame, epochs=EPOCHS, batch_size=128, verbose=0)
        name = f"{mode}:{communicator}" if communicator else mode
        found["losses"][name] = history.history["loss"]
        found["weights"][name] = [w.tolist() for w in spark_model.model.get_weights()]
        found["seconds"][name] = time.time() - began
    found["plain"] = trained_plainly(x, y)
    found["files"] = keep(spark_model, frame)
    if with_logs:
        found["logs"] = log(spark_model, frame)
    found["ranks"] = sparkdl.run(where, num_workers=2)
    with open(result, "w") as file:
        json.dump(found, file)
    spark.stop()


if __name__ == "__main__":
    main()
