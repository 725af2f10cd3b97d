"""Embeddings: the exact modes against plain Keras in one process, in fits that alternate.

Two embeddings (100,000 and 5,000 rows of 8), 60,000 rows, batch 64, Adam. A batch has 64 rows of
each table: the gradient of the tables travels as these rows, not as the tables. "Own steps" is
what bounds the modes: Keras' Adam goes over both tables and its two moments of each at every step,
on every worker, however few rows a gradient has. It is measured as the steps of one process per
worker, without Spark and without an exchange. ``--steps`` measures instead what a step takes of one
processor, in plain Keras and in one worker whose optimizer is compiled by XLA or not.

    python benchmarks/embeddings.py [--repeats 5] [--workers 2] [--epochs 3] [--optimizer adam]
    python benchmarks/embeddings.py --steps
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import workload

ROWS, BATCH, WIDTH = 60_000, 64, 8
USERS, ITEMS = 100_000, 5_000
PHASES = ("read", "compute", "exchange", "wait")


def make_data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Ids of users and items, and whether an item pleases a user."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, USERS, ROWS), rng.integers(0, ITEMS, ROWS)
    tastes = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    liked = (tastes[0][users] * tastes[1][items]).sum(1) > 0
    x = {"user": users.astype("int32"), "item": items.astype("int32")}
    return x, liked.astype("float32")


def make_model(optimizer: str) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    inputs = [keras.Input((), dtype="int32", name=name) for name in ("user", "item")]
    tables = [keras.layers.Embedding(size, WIDTH) for size in (USERS, ITEMS)]
    joined = keras.layers.Concatenate()([t(i) for t, i in zip(tables, inputs, strict=True)])
    hidden = keras.layers.Dense(32, activation="relu")(joined)
    output = keras.layers.Dense(1, activation="sigmoid")(hidden)
    model = keras.Model({i.name: i for i in inputs}, output)
    model.compile(optimizer, "binary_crossentropy")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help="processor time of a step alone")
    options = parser.parse_args()
    if options.steps:
        measure_steps(options)
        return
    if options.alone:
        step_alone(options)
        return
    spark = workload.start_spark(options.workers)
    try:
        measure(spark, options)
    finally:
        spark.stop()


def measure(spark: Any, options: argparse.Namespace) -> None:
    """Prints the table."""
    from sparkdl import SparkModel

    x, y = make_data()
    columns = {"user": x["user"].tolist(), "item": x["item"].tolist(), "label": y.tolist()}
    rows = list(zip(*columns.values(), strict=True))
    frame = spark.createDataFrame(rows, "user int, item int, label float")
    frame = frame.repartition(options.workers).cache()
    frame.count()

    phases: dict[str, dict[str, list[float]]] = {}

    def keras_fit() -> tuple[float, float]:
        model = make_model(options.optimizer)
        began = time.perf_counter()
        model.fit(x, y, batch_size=BATCH, epochs=options.epochs, verbose=0)
        return time.perf_counter() - began, 0.0

    def fit(mode: str) -> tuple[float, float]:
        model = make_model(options.optimizer)
        chosen = {"communicator": "builtin"} if mode == "allreduce" else {}
        spark_model = SparkModel(
            model, mode, num_workers=options.workers, batch_size=BATCH, **chosen
        )
        began = time.perf_counter()
        spark_model.fit(
            frame, epochs=options.epochs, verbose=0, profile=True,
            features={"user": "user", "item": "item"},
        )  # fmt: skip
        ranks = list(spark_model.profile.ranks.values())
        for name in PHASES:
            mean = sum(rank.seconds[name] for rank in ranks) / len(ranks)
            phases.setdefault(mode, {}).setdefault(name, []).append(mean)
        return time.perf_counter() - began, spark_model.summary.seconds

    cases = {
        "plain Keras fit, one process": keras_fit,
        "allreduce, builtin": lambda: fit("allreduce"),
        "synchronous": lambda: fit("synchronous"),
        "own steps": lambda: (0.0, own_steps(options)),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for repeat in range(options.repeats + 1):
        for name, case in cases.items():
            seconds = case()
            print(name, *(f"{s:.2f}" for s in seconds), file=sys.stderr, flush=True)
            if repeat:  # the first of each is to warm up
                found[name].append(seconds)
    trained = ROWS * options.epochs
    keras_s = workload.median([s for s, _ in found["plain Keras fit, one process"]])
    table = []
    for name, seconds in found.items():
        whole, steps = (workload.median([s[i] for s in seconds]) for i in (0, 1))
        table.append(
            [
                name,
                f"{trained / whole:,.0f}" if whole else "",
                f"{keras_s / whole:.2f}" if whole else "",
                f"{trained / steps:,.0f}" if steps else "",
                f"{keras_s / steps:.2f}" if steps else "",
            ]
        )
    header = ["", "fit rows/s", "× Keras", "training rows/s", "× Keras"]
    print("\n" + workload.table(header, table), flush=True)
    seconds = [
        [mode, *(f"{workload.median(told[name][1:]):.2f}" for name in PHASES)]
        for mode, told in phases.items()
    ]
    print("\nSeconds of a fit by phase, mean of the workers:\n")
    print(workload.table(["", *PHASES], seconds), flush=True)


def measure_steps(options: argparse.Namespace) -> None:
    """Prints the milliseconds of one processor that a step takes."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner
    from sparkdl.learner.steps import tensorflow as tensorflow_learner
    from sparkdl.testing.inproc import connect_threads

    x, y = make_data()
    rows = BATCH * 16 * 6
    x, y = {name: ids[:rows] for name, ids in x.items()}, y[:rows]
    table = []
    for name, least in (("plain graph", 1 << 60), ("XLA", 0)):
        tensorflow_learner.LEAST_FUSED = least
        learner = make_learner(make_model(options.optimizer))
        took = []
        (communicator,) = connect_threads(1)
        with communicator:
            steps = AllReduceGradientSynchronizer(communicator, learner.layout)
            steps.start(learner)
            for stack in Batches(rows_from_numpy(x, y), BATCH).stacks(0, 16):
                began = time.process_time()
                steps.train(learner, stack)
                took.append(time.process_time() - began)
        first = f"{took[0] - workload.median(took[1:]):.2f}"
        table.append([f"one worker, {name}", f"{workload.median(took[1:]) / 16 * 1e3:.2f}", first])
    model = make_model(options.optimizer)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    took = []
    for _ in range(5):
        began = time.process_time()
        model.fit(x, y, batch_size=BATCH, verbose=0)
        took.append(time.process_time() - began)
    table.append(["plain Keras fit", f"{workload.median(took) / (rows // BATCH) * 1e3:.2f}", ""])
    print("\n" + workload.table(["", "ms per step", "s, first call"], table), flush=True)


def own_steps(options: argparse.Namespace) -> float:
    """Seconds of the steps of all workers at the same time, without an exchange."""
    command = [sys.executable, os.path.abspath(__file__), "--alone", "--optimizer"]
    command += [options.optimizer, "--workers", str(options.workers)]
    command += ["--epochs", str(options.epochs)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(options.workers)
    ]
    return max(float(process.communicate()[0].split()[-1]) for process in processes)


def step_alone(options: argparse.Namespace) -> None:
    """One worker's steps of all epochs; prints their seconds."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner

    x, y = make_data()
    own = {name: ids[:: options.workers] for name, ids in x.items()}
    learner = make_learner(make_model(options.optimizer))
    batches = Batches(rows_from_numpy(own, y[:: options.workers]), BATCH)
    for stack in batches.stacks(0, 16):
        learner.train(stack)
        if stack.num_batches < 16:
            break
    began = time.perf_counter()
    for epoch in range(options.epochs):
        for stack in batches.stacks(epoch, 16):
            learner.train(stack)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
