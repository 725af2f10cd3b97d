"""Run by test_large_models.py in a process of its own: 480 MB of weights and optimizer state.

    python large_model.py MODE FOLDER [ROWS of the embedding: 400000]

Two executors whose JVMs have 2 GB, a driver's JVM with 1 GB, and results of 256 MB at most. One
epoch, then a second one from its checkpoint. Prints the largest resident memory of the JVMs.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
os.environ["PYTHONPATH"] = ROOT
sys.path.insert(0, ROOT)


def resident_mb(pid: int) -> tuple[int, float]:
    """The parent of a process, and its memory; (0, 0) if it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            told = dict(line.split(":", 1) for line in file)
        with open(f"/proc/{pid}/cmdline") as file:
            java = "java" in file.read().split("\0")[0]
        memory = int(told.get("VmRSS", "0 kB").split()[0]) / 1024
        return int(told["PPid"]), memory if java else 0.0
    except (OSError, KeyError):
        return 0, 0.0


def watch(ended: threading.Event, most: dict[int, float]) -> None:
    """Keeps the largest memory of each JVM below this process."""
    while not ended.wait(0.25):
        found = {int(p): resident_mb(int(p)) for p in os.listdir("/proc") if p.isdigit()}
        mine = {os.getpid()}
        while grown := {p for p, (parent, _) in found.items() if parent in mine} - mine:
            mine |= grown
        for pid in mine:
            most[pid] = max(most.get(pid, 0.0), found.get(pid, (0, 0.0))[1])


def main() -> None:
    import keras
    import numpy as np
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel

    mode, folder = sys.argv[1:3]
    ids = int(sys.argv[3]) if len(sys.argv) > 3 else 400_000
    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.executor.memory", "2048m")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.maxResultSize", "256m")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", ROOT)
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .getOrCreate()
    )
    ended, most = threading.Event(), dict[int, float]()
    watcher = threading.Thread(target=watch, args=(ended, most))
    watcher.start()
    try:
        keras.utils.set_random_seed(0)
        model: Any = keras.Sequential(
            [
                keras.layers.Input((4,), dtype="int32"),
                keras.layers.Embedding(ids, 100),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        before = model.layers[0].embeddings.numpy()
        x = np.arange(256, dtype="int32").reshape(64, 4)
        rows = [(words.tolist(), float(i % 2)) for i, words in enumerate(x)]
        frame = spark.createDataFrame(rows, "features array<int>, label double").repartition(2)
        losses = []
        for epochs in (1, 2):
            spark_model = SparkModel(model, mode, num_workers=2, batch_size=8)
            history = spark_model.fit(
                frame, epochs=epochs, verbose=0, checkpoint_dir=folder, resume=True
            )
            losses += history.history["loss"]
        assert len(losses) == 2, losses
        assert losses[1] < losses[0], losses
        moved = np.abs(model.layers[0].embeddings.numpy() - before).max(axis=1) > 1e-3
        assert moved[:256].all()  # the ids of the rows
        assert not moved[256:].any()
        if mode != "asynchronous":
            assert int(model.optimizer.iterations) == 2 * 4
    finally:
        ended.set()
        watcher.join()
        spark.stop()
    print("JVMS", *(round(value) for value in sorted(most.values()) if value))
    print("LARGE OK")


if __name__ == "__main__":
    main()
