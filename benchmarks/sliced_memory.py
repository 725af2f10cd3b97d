"""The memory of a worker with ``rule='sliced'``, beside plain SGD and beside Adam on every worker.

A network of 100 million weights (25 layers of 2,000 units) on as many workers as are asked for,
each with an executor; every kind runs in a process of its own. Printed is the resident memory of a
worker while it trains (the median and the most of its samples, the largest of the workers), and how
much more it is than with SGD, by the size of Adam's state: 8 bytes for each weight. With ``--time``
fits of Adam with and without slices alternate in one session, and the time of a step is printed.

    python benchmarks/sliced_memory.py [--workers 2] [--width 2000] [--repeats 1] [--time]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
import workload

LAYERS, BATCH, STEPS, EPOCHS = 25, 32, 12, 4
KINDS = {"SGD": ("SGD", None), "Adam, sliced": ("Adam", "sliced"), "Adam": ("Adam", None)}


def watch(ended: threading.Event, samples: dict[int, list[float]]) -> None:
    """Keeps the memory of each Python process below this one, in MB."""
    while not ended.wait(0.1):
        for process in psutil.Process().children(recursive=True):
            try:
                if "python" in process.name():
                    samples.setdefault(process.pid, []).append(process.memory_info().rss / 1e6)
            except psutil.Error:
                continue


def make(kind: str, workers: int, width: int) -> Any:
    """A SparkModel of its own."""
    import keras

    from sparkdl import SparkModel

    optimizer, rule = KINDS[kind]
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    model: Any = keras.Sequential([keras.layers.Input((width,)), *layers])
    model.compile(getattr(keras.optimizers, optimizer)(1e-4), "mse")
    return SparkModel(
        model, mode="allreduce", rule=rule, num_workers=workers, batch_size=BATCH,
        communicator="builtin",
    )  # fmt: skip


def make_rows(workers: int, width: int) -> np.ndarray:
    rows = workers * BATCH * STEPS
    return np.random.default_rng(0).normal(size=(rows, width)).astype("float32")


def time_steps(workers: int, width: int, repeats: int) -> None:
    """Prints the time of a step: that of eight more epochs, by their steps."""
    spark = workload.start_spark(workers)
    x = make_rows(workers, width)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS if kind != "SGD"}
    try:
        for number in range(repeats + 1):
            for kind, times in found.items():
                seconds = {}
                for epochs in (1, 9):
                    began = time.perf_counter()
                    make(kind, workers, width).fit(x, x, epochs=epochs, verbose=0)
                    seconds[epochs] = time.perf_counter() - began
                if number:  # the first fits compile
                    times.append((seconds[9] - seconds[1]) / (8 * STEPS))
    finally:
        spark.stop()
    middle = {kind: statistics.median(times) for kind, times in found.items()}
    print("| optimizer | ms a step | × |")
    print("|---|---|---|")
    for kind, value in middle.items():
        print(f"| {kind} | {value * 1e3:.0f} | {value / middle['Adam']:.2f} |")


def train(kind: str, workers: int, width: int) -> dict[str, float]:
    x = make_rows(workers, width)
    ended, samples = threading.Event(), dict[int, list[float]]()
    spark = workload.start_spark(workers)
    watcher = threading.Thread(target=watch, args=(ended, samples))
    watcher.start()
    try:
        make(kind, workers, width).fit(x, x, epochs=EPOCHS, verbose=0)
    finally:
        ended.set()
        watcher.join()
        spark.stop()
    ranks = sorted(samples.values(), key=max)[-workers:]
    most = [max(values) for values in ranks]
    # The first part of a process' life is its imports, the last its end.
    middle = [statistics.median(values[len(values) // 2 : -2]) for values in ranks]
    return {"median": max(middle), "most": max(most)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time:
        time_steps(options.workers, options.width, options.repeats)
        return
    if options.kind:
        print(json.dumps(train(options.kind, options.workers, options.width)))
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind, results in found.items():
            sizes = ["--workers", str(options.workers), "--width", str(options.width)]
            command = [sys.executable, __file__, "--kind", kind, *sizes]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
            results.append(json.loads(done.stdout.strip().splitlines()[-1]))
    state_mb = 8 * options.width * (options.width + 1) * LAYERS / 1e6
    share = state_mb / options.workers
    print(f"{options.workers} workers; Adam's state {state_mb:.0f} MB, a slice {share:.0f} MB\n")
    print("| optimizer | memory, median | more than SGD, by a slice | most | more than SGD |")
    print("|---|---|---|---|---|")
    base = found["SGD"]
    for kind, results in found.items():
        cells = []
        for value in ("median", "most"):
            mine = statistics.median(r[value] for r in results)
            more = (mine - statistics.median(r[value] for r in base)) / share
            cells += [f"{mine:.0f} MB", f"{more:.2f}"]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
