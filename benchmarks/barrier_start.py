"""What a fit with ``mode='allreduce'`` costs beside its steps: starting and ending a barrier stage.

Small rows, one epoch: the time of the whole call minus the time from the first step to the last.
The part of it before the first step is smaller still.

    python benchmarks/barrier_start.py [--workers 2] [--repeats 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from all_reduce import has_horovod
from workload import make_model, start_spark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    spark = start_spark(options.workers)
    try:
        measure(spark, options)
    finally:
        spark.stop()


def measure(spark: Any, options: argparse.Namespace) -> None:
    """Prints the table."""
    from sparkdl import SparkModel

    rng = np.random.default_rng(0)
    rows = [(rng.random(784).tolist(), i % 10) for i in range(64 * options.workers)]
    frame = spark.createDataFrame(rows, "features array<float>, label int")
    frame = frame.repartition(options.workers).cache()
    frame.count()

    def beside(**chosen: Any) -> float:
        spark_model = SparkModel(make_model(), num_workers=options.workers, **chosen)
        began = time.perf_counter()
        spark_model.fit(frame, verbose=0)
        return time.perf_counter() - began - spark_model.summary.seconds

    cases = {
        "asynchronous, no barrier": {"mode": "asynchronous"},
        "allreduce, built-in": {"mode": "allreduce", "communicator": "builtin"},
    }
    if has_horovod():
        cases["allreduce, Horovod"] = {"mode": "allreduce", "communicator": "horovod"}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.repeats + 1):
        for name, chosen in cases.items():
            times[name].append(beside(**chosen))
    print("| mode | first fit | later fits, median | slowest |")
    print("|---|---|---|---|")
    for name, (first, *later) in times.items():
        median = statistics.median(later)
        print(f"| {name} | {first:.2f} s | {median:.2f} s | {max(later):.2f} s |")


if __name__ == "__main__":
    main()
