"""Run by test_stage_resources.py in a process of its own: ``resources=`` through Spark Connect."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def main() -> None:
    import keras
    import numpy as np
    import pytest
    from connect_port import own_port
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel
    from sparkdl.errors import ConfigError, ResourceError

    spark: Any = (
        SparkSession.builder.remote("local-cluster[1,4,2048]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.connect.grpc.binding.port", own_port())
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .getOrCreate()
    )
    x = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
    data = [(r.tolist(), int(r[0] > 0)) for r in x]
    frame = spark.createDataFrame(data, "features array<float>, label int")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")

    two_each = {"cpus": 2}
    spark_model = SparkModel(model, "allreduce", communicator="builtin", resources=two_each)
    history = spark_model.fit(frame, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    assert spark_model.summary is not None
    assert len(spark_model.summary.rank_rows) == 2, "four cores, two for each worker"
    with pytest.raises(ResourceError, match="3 workers must run at the same time"):
        SparkModel(model, "allreduce", num_workers=3, resources=two_each).fit(frame, verbose=0)
    with pytest.raises(ConfigError, match=r"stage alone on this cluster(.|\n)*fpga"):
        SparkModel(model, "allreduce", resources={"fpga": 1}).fit(frame, verbose=0)
    spark.stop()
    print("STAGE RESOURCES OK")


if __name__ == "__main__":
    main()
