"""Run by test_allreduce.py: Python workers that run JAX already are asked to train TensorFlow."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["KERAS_BACKEND"] = "tensorflow"


def main() -> None:
    import keras
    import psutil
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    import sparkdl
    from sparkdl import SparkModel
    from sparkdl.collective.horovod import unavailable

    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    data = load_digits()
    frame = spark.createDataFrame(
        [((data.data[i] / 16).tolist(), int(data.target[i])) for i in range(len(data.target))],
        "features array<float>, label int",
    ).cache()

    def where() -> Any:
        import keras

        return keras.backend.backend(), os.getpid()

    def make() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def children() -> list[psutil.Process]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "sparkdl.launch.child" in process.cmdline():
                    found.append(process)
        return found

    def kill_a_child() -> None:
        deadline = time.monotonic() + 60
        while not children() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(6)  # in the middle of training
        children()[0].kill()

    try:
        told = sparkdl.run(where, num_workers=2, backend="jax", communicator="builtin")
        assert [backend for backend, _ in told] == ["jax", "jax"], told
        workers = {pid for _, pid in told}
        communicators = ["builtin"] + ["horovod"] * (not unavailable())
        for communicator in communicators:
            spark_model = SparkModel(
                make(), "allreduce", num_workers=2, batch_size=16, communicator=communicator
            )
            history = spark_model.fit(frame, epochs=16, validation_split=0.1, verbose=0)
            print(communicator, history.history["loss"], spark_model.summary, flush=True)
            assert spark_model.summary is not None
            assert spark_model.summary.transports == {communicator}
            assert not workers & set(spark_model.summary.pids.values()), "it trained where JAX runs"
            assert len(history.history["val_loss"]) == 16
            assert history.history["accuracy"][-1] > 0.95, history.history

        killer = threading.Thread(target=kill_a_child)
        killer.start()
        spark_model = SparkModel(make(), "allreduce", num_workers=2, communicator="builtin")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = spark_model.fit(frame, epochs=500, verbose=0)
        killer.join()
        said = [str(w.message) for w in caught if "goes on from epoch" in str(w.message)]
        print(said, len(history.history["loss"]))
        assert len(said) == 1, said
        assert len(history.history["loss"]) == 500
        assert not children()
    finally:
        spark.stop()
    print("OTHER-BACKEND-OK")


if __name__ == "__main__":
    main()
