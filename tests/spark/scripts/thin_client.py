"""Run by test_thin_client.py in an environment with ``pyspark-client``: a notebook's whole way.

python thin_client.py sc://HOST:PORT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import keras
    import numpy as np
    import pyspark
    from pyspark.sql import SparkSession

    import sparkdl
    from sparkdl import SparkModel

    assert not (Path(pyspark.__file__).parent / "jars").exists(), "a client without a server"
    os.environ["PATH"] = "/nowhere"  # and without Java
    spark: Any = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], "float32")
    rows = [(a.tolist(), float(b)) for a, b in zip(x, y, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label float")

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    spark_model = SparkModel(model, "allreduce", num_workers=2, communicator="builtin")
    history = spark_model.fit(frame, epochs=3, batch_size=16, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0] / 2, history.history
    assert spark_model.evaluate(frame)["loss"] < history.history["loss"][0] / 2
    predicted = spark_model.predict(frame).select("prediction").count()
    assert predicted == len(rows)
    pids = sparkdl.run(os.getpid, num_workers=2)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    # the server of this mode is on the client's machine, which is the executors' too
    history = SparkModel(model, "synchronous", num_workers=2).fit(frame, verbose=0)
    assert len(history.history["loss"]) == 1
    print(f"THIN CLIENT OK {pyspark.__version__}")


if __name__ == "__main__":
    main()
