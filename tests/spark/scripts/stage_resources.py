"""Run by test_stage_resources.py in a process of its own: executors with more cores than one."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def main() -> None:
    import keras
    import numpy as np
    import pytest
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel
    from sparkdl.errors import ConfigError, ResourceError

    def session(master: str, gpus: str | None = None) -> Any:
        builder = (
            SparkSession.builder.master(master)
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
            .config("spark.python.daemon.module", "pyspark.daemon" if gpus else "preloaded_workers")
        )
        for owner in ("worker", "executor") if gpus else ():
            builder = builder.config(f"spark.{owner}.resource.gpu.amount", "2").config(
                f"spark.{owner}.resource.gpu.discoveryScript", gpus
            )
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        return spark

    def rows(spark: Any) -> Any:
        x = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
        data = [(r.tolist(), int(r[0] > 0)) for r in x]
        frame = spark.createDataFrame(data, "features array<float>, label int").cache()
        frame.count()  # else other Python workers make the rows in each stage
        return frame

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")

    spark = session("local-cluster[1,4,2048]")
    frame = rows(spark)
    two_each = {"cpus": 2}
    for mode in ("allreduce", "asynchronous"):
        spark_model = SparkModel(model, mode, resources=two_each)
        history = spark_model.fit(frame, epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2
        assert spark_model.summary is not None
        assert len(spark_model.summary.rank_rows) == 2, "four cores, two for each worker"
    with pytest.raises(ResourceError, match=r"3 workers must run at the same time(.|\n)*2 slots"):
        SparkModel(model, "allreduce", num_workers=3, resources=two_each).fit(frame, verbose=0)
    with pytest.raises(ConfigError, match=r"received: .*fpga"):
        SparkModel(model, resources={"fpga": 1}).fit(frame, verbose=0)
    assert frame.count() == 200, "other stages have all four cores"
    spark.stop()

    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "gpus.sh")
        with open(script, "w") as file:
            file.write('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
        os.chmod(script, 0o755)
        spark = session("local-cluster[1,2,2048]", script)
        frame = rows(spark)
        for mode in ("asynchronous", "allreduce"):
            spark_model = SparkModel(model, mode, resources={"gpu": 1})
            spark_model.fit(frame, epochs=1, verbose=0)
            assert spark_model.summary is not None
            assert sorted(spark_model.summary.gpus.values()) == [("0",), ("1",)], mode
        spark.stop()

    spark = session("local[2]")
    with pytest.raises(ConfigError, match="training stage alone on this cluster"):
        SparkModel(model, resources=two_each).fit(rows(spark), verbose=0)
    spark.stop()
    print("STAGE RESOURCES OK")


if __name__ == "__main__":
    main()
