"""An embedding in a table spread over the workers, beside one in the model, by the number of ids.

Eight ids a row, of a Zipf law, 16 numbers each, Adagrad, batch 256; two workers in ``allreduce``;
both models alternate. Printed are rows a second of training (the best of the fits after the first,
which compiles), and the bytes that a worker sends for the table.

    python benchmarks/large_embeddings.py [--ids 10000 100000 1000000 10000000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import numpy as np
import workload

FIELDS, WIDTH, BATCH, ROWS = 8, 16, 256, 40_960
LARGEST_DENSE = 1_000_000


def make_data(ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all fields from 0 on, and labels of a planted model."""
    rng = np.random.default_rng(0)
    x = rng.zipf(1.05, (ROWS, FIELDS)) * 2_654_435_761 % ids
    taste = rng.normal(size=ids).astype("float32")
    return x.astype("int64"), (taste[x].sum(1) > 0).astype("float32")


def make_model(ids: int, served: bool) -> Any:
    import keras

    from sparkdl.layers import ServedEmbedding

    keras.utils.set_random_seed(1)
    given = keras.Input((FIELDS,), dtype="int64")
    layer = ServedEmbedding(WIDTH, table="ids") if served else keras.layers.Embedding(ids, WIDTH)
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Flatten()(layer(given)))
    model = keras.Model(given, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.Adagrad(0.05), "binary_crossentropy")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, nargs="*", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    spark = workload.start_spark(options.workers)
    try:
        table = [measure(spark, ids, options) for ids in options.ids]
        header = ["ids", "in a table, rows/s", "in the model, rows/s", "×"]
        print("\n" + workload.table(header, table))
    finally:
        spark.stop()


def measure(spark: Any, ids: int, options: argparse.Namespace) -> list[str]:
    """One line: medians of the fits after the first."""
    from sparkdl import SparkModel

    x, y = make_data(ids)
    rows = [(each.tolist(), float(label)) for each, label in zip(x, y, strict=True)]
    frame = spark.createDataFrame(rows, "features array<bigint>, label float")
    frame = frame.repartition(options.workers).cache()
    frame.count()
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options.repeats + 1):
        for served in (True, False):
            if not served and ids > LARGEST_DENSE:
                continue
            with tempfile.TemporaryDirectory() as folder:
                model = SparkModel(
                    make_model(ids, served), "allreduce", num_workers=options.workers,
                    batch_size=BATCH, communicator="builtin",
                )  # fmt: skip
                where = {"checkpoint_dir": folder} if served else {}
                model.fit(frame, epochs=4, verbose=0, **where)
                rates[served].append(4 * ROWS / model.summary.seconds)
                print(ids, served, f"{rates[served][-1]:,.0f}", file=sys.stderr, flush=True)
    told = {kind: workload.median(found[1:]) if found else 0.0 for kind, found in rates.items()}
    ratio = f"{told[True] / told[False]:.2f}" if told[False] else ""
    dense = f"{told[False]:,.0f}" if told[False] else ""
    return [f"{ids:,}", f"{told[True]:,.0f}", dense, ratio]


if __name__ == "__main__":
    main()
