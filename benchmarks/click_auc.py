"""Rows in tables learn: AUC on click logs, beside dense embeddings and the planted model.

The rows, the factorization machine and its teacher are those of ``examples/click_logs.py``. With
tables two workers train in ``allreduce`` through Spark; plain Keras trains the same network with
``keras.layers.Embedding`` on the same rows in one process (JAX, which sums the gradients of an id
that comes twice, as tables do) from the same start, with batches of both workers' size. An id that
was never trained has zeros in both.

    python benchmarks/click_auc.py [--rows 400000] [--epochs 2] [--most-ids 10000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import click_logs

BATCH, WORKERS = 512, 2


def dense_model(ids: int) -> Any:
    """The factorization machine of the example with embeddings in the model."""
    import keras
    from keras import ops

    keras.utils.set_random_seed(1)
    places = keras.Input((len(click_logs.CARDINALITIES),), dtype="int32")
    weights = keras.layers.Embedding(ids, 1, "zeros", name="weights")(places)
    factors = keras.layers.Embedding(ids, click_logs.FACTORS, name="factors")(places)
    pairs = ops.square(ops.sum(factors, axis=1)) - ops.sum(ops.square(factors), axis=1)
    both = keras.layers.Concatenate()([ops.sum(weights, axis=1), 0.5 * pairs])
    model = keras.Model(places, keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")(both))
    model.compile(keras.optimizers.Adagrad(0.2), "binary_crossentropy")
    return model


def train_dense(folder: str, epochs: int) -> None:
    """Plain Keras in a process of its own: from ``rows.npz`` to ``scores.npy``."""
    rows = np.load(f"{folder}/rows.npz")
    unknown = int(rows["x"].max()) + 1
    model = dense_model(unknown + 1)
    model.get_layer("factors").set_weights([np.pad(rows["factors"], ((0, 1), (0, 0)))])
    model.layers[-1].set_weights([rows["kernel"], rows["bias"]])
    x, held = rows["x"].astype("int32"), rows["held"].astype("int32")
    model.fit(x, rows["y"], batch_size=WORKERS * BATCH, epochs=epochs, verbose=0)
    for name in ("weights", "factors"):
        [values] = model.get_layer(name).get_weights()
        values[unknown] = 0
        model.get_layer(name).set_weights([values])
    np.save(f"{folder}/scores.npy", model.predict(held, batch_size=4096, verbose=0)[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--most-ids", type=int, default=10_000, help="of a field")
    parser.add_argument("--dense", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dense:
        train_dense(options.dense, options.epochs)
        return
    from sparkdl import SparkModel

    ids, clicks, _ = click_logs.make_rows(options.rows, 0, options.most_ids)
    held_ids, held, planted = click_logs.make_rows(options.rows // 4, 7, options.most_ids)
    known, places = np.unique(ids, return_inverse=True)
    network = click_logs.make_model()
    factors = next(layer for layer in network.layers if getattr(layer, "table", "") == "factors")
    kernel, bias = network.layers[-1].get_weights()
    start = {"factors": factors.rows(known), "kernel": kernel, "bias": bias}
    spark = workload.start_spark(WORKERS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = SparkModel(network, "allreduce", num_workers=WORKERS, batch_size=BATCH)
            model.fit({"ids": ids}, clicks, epochs=options.epochs, checkpoint_dir=folder, verbose=0)
            served = model.model.predict(held_ids, batch_size=4096, verbose=0)[:, 0]
    finally:
        spark.stop()

    held_places = np.searchsorted(known, held_ids).clip(0, len(known) - 1)
    held_places[known[held_places] != held_ids] = len(known)  # the row of the unknown
    with tempfile.TemporaryDirectory() as folder:
        rows = {"x": places.reshape(ids.shape), "y": clicks, "held": held_places}
        np.savez(f"{folder}/rows.npz", **rows, **start)
        command = [sys.executable, __file__, "--dense", folder, "--epochs", str(options.epochs)]
        subprocess.run(command, env={**os.environ, "KERAS_BACKEND": "jax"}, check=True)
        plain = np.load(f"{folder}/scores.npy")
    scores = {"tables": served, "Embedding": plain, "the planted model": planted}
    lines = [[name, f"{click_logs.auc(held, found):.4f}"] for name, found in scores.items()]
    print(f"{len(known):,} ids in {options.rows:,} rows, {options.epochs} epochs\n")
    print(workload.table(["scores of", "AUC"], lines))


if __name__ == "__main__":
    main()
