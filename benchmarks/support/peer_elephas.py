"""A fit or a predict of Elephas, in Elephas' own virtual environment. Prints JSON.

Started by peers.py (``fit ...``) and by inference.py (``predict ...``).
"""

from __future__ import annotations

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import workload
from elephas.spark_model import AsynchronousSparkModel, SparkModel
from elephas.utils.rdd_utils import to_simple_rdd


def fit() -> None:
    import keras

    frequency, server = sys.argv[2:4]
    rows, epochs, seed = map(int, sys.argv[4:7])
    x, y = workload.make_data()
    spark = workload.start_spark(2)
    model = workload.make_model(seed=seed)
    one_hot = keras.utils.to_categorical(y, 10)
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=["accuracy"])
    rdd = to_simple_rdd(spark.sparkContext, x[:rows], one_hot[:rows]).repartition(2).cache()
    rdd.count()
    port = 4000 + os.getpid() % 2000

    def make(number: int) -> AsynchronousSparkModel:
        # Its SparkModel takes mode="asynchronous" too, and trains synchronously. Without
        # num_workers it leaves the two partitions as they are.
        return AsynchronousSparkModel(
            model, mode="asynchronous", frequency=frequency, parameter_server_mode=server,
            port=port + number,
        )  # fmt: skip

    weights = model.get_weights()
    make(0).fit(rdd, epochs=epochs, batch_size=workload.BATCH, verbose=0, validation_split=0)
    model.set_weights(weights)
    spark_model = make(1)
    started = time.perf_counter()
    spark_model.fit(rdd, epochs=epochs, batch_size=workload.BATCH, verbose=0, validation_split=0)
    seconds = time.perf_counter() - started
    loss = spark_model.master_network.evaluate(x, one_hot, verbose=0)[0]
    print("\nRESULT " + json.dumps({"rows_s": rows * epochs / seconds, "loss": loss}), flush=True)
    os._exit(0)  # its Flask thread does not end


def predict() -> None:
    import inference

    part, rows = sys.argv[2], int(sys.argv[3])
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


{"fit": fit, "predict": predict}[sys.argv[1]]()
