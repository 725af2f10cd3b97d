"""Run by test_allreduce.py in a process of its own: training through Spark Connect."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests/start"
sys.path.insert(0, ROOT)


def main() -> None:
    import keras
    import pytest
    from connect_port import own_port
    from pyspark.errors import PythonException
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    from sparkdl import SparkModel
    from sparkdl.errors import ResourceError, WorkerError
    from sparkdl.spark.runs.capacity import default_parallelism

    spark = (
        SparkSession.builder.remote("local-cluster[2,1,1536]")
        .config("spark.connect.grpc.binding.port", own_port())
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .getOrCreate()
    )

    class Breaks(keras.layers.Layer):
        """Cannot be built on rank 1."""

        def __init__(self, **options: Any) -> None:
            from pyspark import TaskContext

            super().__init__(**options)
            context = TaskContext.get()
            if context is not None and context.partitionId() == 1:
                raise ValueError("cannot be built here")

        def call(self, x: Any) -> Any:
            return x

    try:
        assert default_parallelism(spark) == 2, default_parallelism(spark)
        data = load_digits()
        rows = [
            ((data.data[i] / 16).tolist(), int(data.target[i])) for i in range(len(data.target))
        ]
        frame = spark.createDataFrame(rows, "features array<float>, label int")
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        spark_model = SparkModel(model, "allreduce", communicator="builtin", batch_size=16)
        history = spark_model.fit(frame, epochs=5, validation_split=0.1, verbose=2)
        assert len(history.history["val_loss"]) == 5, history.history
        assert spark_model.summary is not None
        assert len(spark_model.summary.pids) == 2, spark_model.summary

        # a callback needs a stage per epoch here
        stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)
        history = spark_model.fit(frame, epochs=9, callbacks=[stop], verbose=0)
        assert len(history.history["loss"]) == 2, history.history
        spark_model.fit(frame, epochs=8, verbose=0)
        accuracy = spark_model.evaluate(frame)["accuracy"]
        assert accuracy > 0.95, accuracy
        assert spark_model.predict(frame).select("prediction").count() == len(rows)
        gap = spark.createDataFrame([([None] + 63 * [0.0], 1)], frame.schema)
        with pytest.raises(PythonException, match="row 0 of the partition") as failed:
            spark_model.predict(gap).collect()
        assert str(failed.value).count("  File") == 1, failed.value  # frames between are folded
        assert "  hint: df.dropna() and df.fillna()" in str(failed.value)
        with pytest.raises(ResourceError, match="7 workers"):
            SparkModel(model, "allreduce", num_workers=7).fit(frame)

        broken = keras.Sequential([keras.Input((64,)), Breaks(), keras.layers.Dense(10)])
        broken.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        began = time.monotonic()
        with pytest.raises(WorkerError, match="cannot be built here") as caught:
            SparkModel(broken, "allreduce", communicator="builtin").fit(frame, verbose=0)
        assert caught.value.rank == 1
        assert time.monotonic() - began < 30  # the others wait for this rank, but are ended
        print("CONNECT OK")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
