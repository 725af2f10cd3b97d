"""Run by test_gpu.py in a process of its own: a cluster whose discovery script invents GPUs."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def check_inference(model: Any, frame: Any, x: Any) -> None:
    import numpy as np
    import pytest

    from sparkdl import SparkModel

    inference = SparkModel(model, use_gpu=False)
    want = model.predict(x, verbose=0)
    got = inference.predict(frame).collect()
    by_row = {tuple(row.features): row.prediction for row in got}
    np.testing.assert_allclose([by_row[tuple(r.tolist())] for r in x], want, atol=1e-5)
    rdd = frame.sparkSession.sparkContext.parallelize(list(x), 2)
    np.testing.assert_allclose(inference.predict(rdd).collect(), want, atol=1e-5)
    told = inference.evaluate(frame)
    loss = model.evaluate(x, (x[:, 0] > 0).astype("int64"), verbose=0)
    np.testing.assert_allclose(told["loss"], loss, rtol=1e-5)
    with pytest.raises(Exception, match="DataError"):
        inference.predict(rdd.map(lambda row: row[:2])).collect()


def main() -> None:
    import keras
    import numpy as np
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel

    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "gpus.sh")
        with open(script, "w") as file:
            addresses = ", ".join(f'"GPU-{c * 8}"' for c in "abcd")
            file.write(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
        os.chmod(script, 0o755)
        spark = (
            SparkSession.builder.master("local-cluster[1,2,2048]")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.worker.resource.gpu.amount", "4")
            .config("spark.worker.resource.gpu.discoveryScript", script)
            .config("spark.executor.resource.gpu.amount", "4")
            .config("spark.executor.resource.gpu.discoveryScript", script)
            .config("spark.task.resource.gpu.amount", "2")
            .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")
        x = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
        frame = spark.createDataFrame(
            [(r.tolist(), int(r[0] > 0)) for r in x], "features array<float>, label int"
        ).cache()  # else other Python workers make the rows in each stage, and import Keras at last
        frame.count()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")

        def fit(use_gpu: Any) -> Any:
            spark_model = SparkModel(model, num_workers=2, use_gpu=use_gpu)
            spark_model.fit(frame, verbose=0)
            assert spark_model.summary is not None
            return spark_model.summary

        first = fit("auto")
        print("first", first.gpus, first.pids)
        given = sorted(a for gpus in first.gpus.values() for a in gpus)
        assert given == [f"GPU-{c * 8}" for c in "abcd"], given  # two each, none twice
        again = fit(True)
        print("again", again.gpus, again.pids)
        assert sorted(a for gpus in again.gpus.values() for a in gpus) == given
        on_cpu = fit(False)  # the same worker processes are reused: these need children
        print("on_cpu", on_cpu.gpus, on_cpu.pids)
        assert all(gpus == () for gpus in on_cpu.gpus.values())
        assert not set(on_cpu.pids.values()) & set(first.pids.values())
        if "inference" in sys.argv:  # in children of the same workers, too
            check_inference(model, frame, x)
        after = fit("auto")
        print("after", after.gpus, after.pids)
        assert sorted(a for gpus in after.gpus.values() for a in gpus) == given
        probe = (
            frame.limit(2)
            .repartition(2)
            .rdd.mapPartitions(lambda _: [os.environ.get("CUDA_VISIBLE_DEVICES")])
        )
        assert set(probe.collect()) == {None}  # nothing stays behind in the reused workers
        spark.stop()
    print("GPU-TEST-OK")


if __name__ == "__main__":
    main()
