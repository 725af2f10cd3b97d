"""Memory of four workers of one executor that predict with a large model, summed (PSS).

    python benchmarks/memory.py [--mib 400] [--backends tensorflow jax torch] [--trees DIR ...]
                                [--udf] [--idle] [--fit]

Four task slots of one executor predict with a network of ``--mib`` MiB of weights over eight
partitions, twice; while the second goes on the proportional set sizes (``Pss`` of
``/proc/PID/smaps_rollup``: pages that several processes map count in parts) of all Python workers
are summed, ten times a second, and the median is printed, with the most of the whole run. "idle" is
the same with a model of one layer of 8 units: interpreter, Spark and framework. ``--trees``:
folders of other builds, whose ``sparkdl`` is measured in the same run. ``--udf``:
``pyspark.ml.functions.predict_batch_udf`` around the same model, saved as a file. ``--fit``: the
same of a fit in ``synchronous``, whose layers have adapters (LoRA) beside their frozen weights;
the median from the end of its first epoch on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
LAYERS, SLOTS = 4, 4


def make_model(mib: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    width = int((mib * 2**18 / LAYERS) ** 0.5) if mib else 8
    layers = [keras.layers.Dense(width) for _ in range(LAYERS if mib else 1)]
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(width), *layers])


def pss_mib() -> float:
    """The sum over the Python workers, which descend from this process."""
    parents, total = {}, 0.0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parents[int(pid)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                is_worker = b"pyspark.daemon" in file.read()
            if above == os.getpid() and is_worker:
                with open(f"/proc/{pid}/smaps_rollup") as file:
                    lines = [line.split() for line in file]
                total += next(int(x[1]) for x in lines if x[0] == "Pss:") / 1024
        except (OSError, StopIteration):
            continue
    return total


def fit(model: Any, frame: Any, ended: Callable[..., None]) -> None:
    """Trains adapters of all layers; ``ended`` is called after each epoch."""
    import keras

    from sparkdl import SparkModel

    for layer in model.layers:
        layer.enable_lora(4)
    tuned = keras.Sequential([model, keras.layers.Dense(1)])
    tuned.build((None, 1))
    tuned.compile("adam", "mse")
    spark_model = SparkModel(tuned, "synchronous", num_workers=SLOTS, batch_size=32)
    told = keras.callbacks.LambdaCallback(on_epoch_end=ended)
    spark_model.fit(frame, features="x", label="x", epochs=10, verbose=0, callbacks=[told])


def measure(mib: int, use_udf: bool, trains: bool) -> None:
    """Prints the median and the most."""
    import keras
    import numpy as np
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, FloatType

    import sparkdl

    spark = (
        SparkSession.builder.master(f"local-cluster[1,{SLOTS},2048]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.executorEnv.KERAS_BACKEND", keras.backend.backend())
        .getOrCreate()
    )
    model = make_model(mib)
    frame = spark.range(0, 1600, 1, SLOTS).select((F.col("id") / 1600).cast("float").alias("x"))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        if use_udf:
            model.save(path)

            def make() -> Any:
                import keras

                loaded = keras.models.load_model(path)
                return lambda x: loaded.predict_on_batch(np.asarray(x, "float32").reshape(-1, 1))

            udf = predict_batch_udf(make, return_type=ArrayType(FloatType()), batch_size=32)
            scored = frame.select(F.size(udf("x")))
        elif not trains:
            scored = sparkdl.predict(model, frame, features="x").select(F.size("prediction"))
        if not trains:
            scored.write.format("noop").mode("overwrite").save()
        seen: list[float] = []
        first: list[int] = []  # of the samples while the model trains
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.1):
                seen.append(pss_mib())

        thread = threading.Thread(target=sample)
        thread.start()
        if trains:
            fit(model, frame, lambda epoch, logs: first.append(len(seen)))
        for _ in range(0 if trains else 2):
            scored.write.format("noop").mode("overwrite").save()
        done.set()
        thread.join()
    spark.stop()
    print("RESULT", statistics.median(seen[first[0] if trains else 0 :]), max(seen), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--backends", nargs="*", default=["tensorflow", "jax", "torch"])
    parser.add_argument("--trees", nargs="*", default=[])
    parser.add_argument("--udf", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    if given.one:
        measure(given.mib, given.udf, given.fit)
        return
    here = os.path.dirname(HERE)
    fits = ["--fit"] if given.fit else []
    ways = [("sparkdl", here, [str(given.mib), *fits])]
    ways += [("idle", here, ["0"])] if given.idle else []
    ways += [(os.path.basename(tree), tree, [str(given.mib), *fits]) for tree in given.trees]
    ways += [("batch udf", here, [str(given.mib), "--udf"])] if given.udf else []
    print("| backend | build | MiB while predicting | MiB at most |\n|---|---|---|---|", flush=True)
    for backend in given.backends:
        for name, tree, settings in ways:
            started = time.monotonic()
            out = subprocess.run(
                [sys.executable, os.path.abspath(__file__), "--one", "--mib", *settings],
                env={**os.environ, "PYTHONPATH": tree, "KERAS_BACKEND": backend,
                     "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            told = [line.split()[1:] for line in out.stdout.splitlines() if line[:6] == "RESULT"]
            values = [f"{float(v):,.0f}" for v in told[0]] if told else ["failed", "failed"]
            print(f"| {backend} | {name} | {values[0]} | {values[1]} |", flush=True)
            if not told:
                print(out.stderr[-2000:], file=sys.stderr)
            print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
