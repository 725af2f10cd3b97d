"""How often each row was trained in a fit with a fault in it: a model whose weights are counters.

The model has one weight per row, and its loss is minus the weight of each row in the batch. SGD
adds ``rate / rows of the step`` to the weights of these rows, which the rate makes 1. So after the
fit the weights say how often each row counted: in all modes ``epochs`` times, whatever died.

    python benchmarks/faults.py --results faults.jsonl --only count-
"""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH = 16
WORKERS = 2
ROWS = {"asynchronous": 1 << 17, "hogwild": 1 << 17, "synchronous": 1 << 13, "allreduce": 1 << 14}
"""So many that an epoch takes about a second, so that a fault comes amid one."""
RULES: dict[str, Any] = {
    "asynchronous": {"name": "downpour", "damping": False},
    "hogwild": {"name": "hogwild", "damping": False},
}
"""Damping would make workers' changes count in part, which is right, but no count."""
LEASE_S = 4.0
"""A worker that is silent for longer counts as dead, in ``count-silent``."""


SHUFFLED = "-shuffled"
"""At the end of a fault in which the rows come out of a shuffle, in another order each time."""


def counts(kind: str) -> bool:
    """Whether a fault's cell counts rows."""
    return kind.startswith("count-")


def make_frame(spark: Any, mode: str, kind: str = "") -> Any:
    """The numbers of the rows, in partitions that Spark deals to the workers evenly."""
    from pyspark.sql import functions as F

    numbers = spark.range(0, ROWS[mode], 1, 4)
    features = F.array(F.col("id").cast("int")).alias("features")
    frame = numbers.select(features, F.lit(0.0).cast("float").alias("label"))
    return frame.repartition(7).repartition(5) if kind.endswith(SHUFFLED) else frame


def make_model(mode: str, *, summed: bool = False) -> Any:
    """The model of counters.

    Args:
        summed: The loss is a sum over the rows of a step, so that each counts once however many a
            step has; else it is their mean, which the rate makes a sum for steps of full batches.
    """
    import keras

    def uncounted(y_true: Any, y_pred: Any) -> Any:
        return -keras.ops.mean(y_pred, axis=-1)

    class Summed(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return uncounted(y_true, y_pred)

    inputs = keras.Input((1,), dtype="int32")
    counters = keras.layers.Embedding(ROWS[mode], 1, embeddings_initializer="zeros")
    model = keras.Model(inputs, keras.layers.Flatten()(counters(inputs)))
    joined = mode in ("synchronous", "allreduce")
    rate = 1.0 if summed else float(BATCH * (WORKERS if joined else 1))
    loss = Summed(reduction="sum") if summed else uncounted
    model.compile(keras.optimizers.SGD(rate), loss)
    return model


def make_spark_model(kind: str, mode: str, *, summed: bool = False) -> Any:
    from sparkdl import Limits, SparkModel

    limits = Limits(worker_timeout_s=LEASE_S) if kind == "count-silent" else Limits()
    return SparkModel(
        make_model(mode, summed=summed),
        mode,
        num_workers=WORKERS,
        batch_size=BATCH,
        rule=RULES.get(mode),
        limits=limits,
    )


def found(model: Any, epochs: int) -> dict[str, Any]:
    """What a cell reports: how many rows were trained more or less often than ``epochs`` times."""
    trained = np.asarray(model.get_weights()[0])[:, 0]
    return {
        "rows": len(trained),
        "rows_off": int(np.sum(trained != epochs)),
        "least": float(trained.min()),
        "most": float(trained.max()),
    }
