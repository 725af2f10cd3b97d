"""One Elephas fit, in Elephas' own virtual environment; started by peers.py. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import workload
from elephas.spark_model import AsynchronousSparkModel
from elephas.utils.rdd_utils import to_simple_rdd


def main() -> None:
    import keras

    frequency, server = sys.argv[1:3]
    rows, epochs, seed = map(int, sys.argv[3:6])
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


main()
