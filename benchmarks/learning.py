"""How well each mode learns, against plain Keras at equal epochs: MNIST (CNN), a9a, text8.

    python benchmarks/learning.py [--workers 2 4] [--only mnist a9a] [--seeds 1 2 3 4 5]

Test accuracy (MNIST; ``--only text8``: of the next letter, by a language model) and test AUC (a9a)
after equal epochs, at the same number of steps: in the modes that do not wait each worker trains
Keras' batch size; in the exact modes the workers divide Keras' batch (32 / workers each), so that a
step of all of them is a step of Keras. A seed gives the initial weights and the order of the rows;
the means over all seeds are compared. The data go through Spark as those of any user.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
import workload

TASKS: dict[str, Any] = {
    "mnist": (workload.mnist, workload.mnist_model, "accuracy", 8, 32),
    "a9a": (workload.a9a, workload.a9a_model, "auc", 4, 32),
    "text8": (workload.text8, workload.text8_model, "accuracy", 8, 32),
}
EXACT = ("synchronous", "allreduce")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", nargs="*", choices=list(TASKS), default=["mnist", "a9a"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--case", nargs="*", help="mode:frequency:rule, e.g. asynchronous:8:dynsgd",
        default=["asynchronous", "hogwild", "synchronous"],
    )  # fmt: skip
    args = parser.parse_args()
    if workload.folder() is None:
        print("The data are not here; set SPARKDL_DATA.")
        return
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local-cluster[2,2,2048]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.executorEnv.PYTHONPATH", os.path.dirname(os.path.dirname(__file__)))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        for name in args.only:
            run(spark, name, args)
    finally:
        spark.stop()


@dataclass(frozen=True)
class Outcome:
    """Metric and loss of one trained model on the test rows."""

    metric: float
    loss: float
    seconds: float


def run(spark: Any, name: str, args: Any) -> None:
    load, make, metric, epochs, batch = TASKS[name]
    x, y, x_test, y_test = load()
    print(f"\n{name}: {len(x)} rows, {epochs} epochs, batch {batch}", flush=True)

    def outcome(model: Any, started: float) -> Outcome:
        seconds = time.perf_counter() - started
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
        return Outcome(result[metric], result["loss"], seconds)

    def plain(seed: int) -> Outcome:
        model = make(seed)
        started = time.perf_counter()
        model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0)
        return outcome(model, started)

    def spread(seed: int, frame: Any, case: str, workers: int) -> Outcome:
        from sparkdl import SparkModel

        mode, frequency, rule = [*case.split(":"), "", ""][:3]
        spark_model = SparkModel(
            make(seed), mode, int(frequency) if frequency.isdigit() else frequency or "auto",
            num_workers=workers, batch_size=batch // workers if mode in EXACT else batch,
            rule=rule or None, seed=seed,
        )  # fmt: skip
        started = time.perf_counter()
        spark_model.fit(frame, epochs=epochs, verbose=0)
        return outcome(spark_model.model, started)

    base = [plain(seed) for seed in args.seeds]
    print("  ", *row("plain Keras", 1, base, base), flush=True)
    rows = [row("plain Keras", 1, base, base)]
    for workers in args.workers:
        frame = make_frame(spark, x, y, workers)
        for case in args.case:
            outcomes = [spread(seed, frame, case, workers) for seed in args.seeds]
            rows.append(row(case, workers, outcomes, base))
            print("  ", *rows[-1], flush=True)
        frame.unpersist()
    header = ["mode", "workers", f"test {metric}", "lowest", "highest", "points from Keras"]
    print(workload.table([*header, "test loss", "seconds"], rows), flush=True)
    print("load", *(f"{value:.1f}" for value in os.getloadavg()), flush=True)


def row(case: str, workers: int, outcomes: list[Outcome], base: list[Outcome]) -> list[str]:
    """A row of the table; ``points`` is the difference of the means, in hundredths."""
    metrics, losses = [o.metric for o in outcomes], [o.loss for o in outcomes]
    points = 100 * (mean(metrics) - mean([o.metric for o in base]))
    return [
        case, str(workers), f"{mean(metrics):.4f}", f"{min(metrics):.4f}", f"{max(metrics):.4f}",
        "" if outcomes is base else f"{points:+.2f}",
        f"{mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
        f"{workload.median([o.seconds for o in outcomes]):.1f}",
    ]  # fmt: skip


def make_frame(spark: Any, x: Any, y: Any, workers: int) -> Any:
    import pyarrow as pa

    flat = x.reshape(len(x), -1)
    features = pa.array([row.tobytes() for row in flat], pa.binary())
    table = pa.table({"features": features, "label": pa.array(list(y) if y.ndim > 1 else y)})
    frame = spark.createDataFrame(table).repartition(workers).cache()
    frame.count()
    return frame


if __name__ == "__main__":
    main()
