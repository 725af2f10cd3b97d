"""Training speed and loss: plain Keras, bare processes, and sparkdl in each mode; one run.

    python benchmarks/training.py [--repeats 5] [--workers 2]

All are run alternately, medians are printed. "fit" is the wall time of the whole call, Spark job,
data transfer and all; "training" counts from the first to the last step of the workers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
import workload
from workload import BATCH, EPOCHS, ROWS, make_data, make_frame, make_model, start_spark


class Bare:
    """Two independent processes with the same compiled step."""

    def __init__(self, workers: int, window: int = 8) -> None:
        script = os.path.join(os.path.dirname(__file__), "bare_process.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(workers), str(window)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(workers)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdout.readline().strip() == "ready"

    def run(self) -> float:
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(float(process.stdout.readline()) for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    x, y = make_data()
    spark = start_spark(args.workers)
    try:
        run(spark, x, y, args)
    finally:
        spark.stop()


def run(spark: Any, x: Any, y: Any, args: Any) -> None:
    from sparkdl import SparkModel

    frame = make_frame(spark, x, y, args.workers)
    bare = Bare(args.workers)
    keras_model = make_model()
    keras_model.fit(x[:BATCH], y[:BATCH], verbose=0)

    def keras_fit(**options: Any) -> tuple[float, float, float]:
        model = make_model()
        started = time.perf_counter()
        history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, **options)
        return time.perf_counter() - started, 0.0, history.history["loss"][-1]

    def spark_fit(mode: str, frequency: Any = "auto", **options: Any) -> tuple[float, float, float]:
        spark_model = SparkModel(
            make_model(), mode, frequency, num_workers=args.workers, batch_size=BATCH, **options
        )
        started = time.perf_counter()
        history = spark_model.fit(frame, epochs=EPOCHS, verbose=0)
        seconds = time.perf_counter() - started
        return seconds, spark_model.summary.seconds, history.history["loss"][-1]

    cases: dict[str, Any] = {
        "plain Keras fit, one process": keras_fit,
        "asynchronous, auto": lambda: spark_fit("asynchronous"),
        "asynchronous, batch": lambda: spark_fit("asynchronous", "batch"),
        "asynchronous, epoch": lambda: spark_fit("asynchronous", "epoch"),
        "hogwild, auto": lambda: spark_fit("hogwild"),
        "synchronous, batch (exact)": lambda: spark_fit("synchronous"),
        "synchronous, window 16": lambda: spark_fit("synchronous", 16),
        "asynchronous, auto, socket": lambda: spark_fit(
            "asynchronous", parameter_server_mode="socket"
        ),
        "asynchronous, auto, http": lambda: spark_fit("asynchronous", parameter_server_mode="http"),
    }
    cold = cases["asynchronous, auto"]()
    warm = cases["asynchronous, auto"]()
    print(f"first fit in a session: {cold[0]:.2f} s, second: {warm[0]:.2f} s\n", flush=True)
    results: dict[str, list[Any]] = {name: [] for name in cases}
    limits: list[float] = []
    for _ in range(args.repeats):
        for name, case in cases.items():
            results[name].append(case())
        limits.append(bare.run())
    bare.close()
    limit = workload.median(limits)
    base = workload.median([ROWS * EPOCHS / r[0] for r in results["plain Keras fit, one process"]])
    base_loss = workload.median([r[2] for r in results["plain Keras fit, one process"]])
    rows = []
    for name, runs in results.items():
        speed = workload.median([ROWS * EPOCHS / r[0] for r in runs])
        training = workload.median([ROWS * EPOCHS / r[1] if r[1] else 0.0 for r in runs])
        loss = workload.median([r[2] for r in runs])
        rows.append([
            name, f"{speed:,.0f}", f"{speed / base:.2f}", f"{training:,.0f}" if training else "",
            f"{training / limit:.2f}" if training else "", f"{loss:.3f}", f"{loss / base_loss:.3f}",
        ])  # fmt: skip
    rows.append([
        f"{args.workers} bare processes, same step", f"{limit:,.0f}", f"{limit / base:.2f}",
        f"{limit:,.0f}", "1.00", "", "",
    ])  # fmt: skip
    print(workload.table(
        ["", "fit rows/s", "× Keras", "training rows/s", "× bare", "loss", "× Keras' loss"], rows
    ))  # fmt: skip


main()
