"""How well each mode learns, against plain Keras at equal epochs: MNIST (CNN) and a9a.

    python benchmarks/learning.py [--workers 2 4] [--only mnist a9a] [--seeds 1]

Test accuracy (MNIST) and test AUC (a9a) after equal epochs, at the same number of steps: workers
of the modes that do not wait train Keras' batch size each; those of the synchronous mode share
Keras' batch (32 / workers each), so that its steps are Keras' steps. The data go through Spark as
any user's would.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
import datasets
import workload

TASKS: dict[str, Any] = {
    "mnist": (datasets.mnist, datasets.mnist_model, "accuracy", 8, 32),
    "a9a": (datasets.a9a, datasets.a9a_model, "auc", 4, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", nargs="*", default=list(TASKS))
    parser.add_argument(
        "--case", nargs="*", help="mode:frequency:rule, e.g. asynchronous:8:dynsgd",
        default=["asynchronous", "hogwild", "synchronous"],
    )  # fmt: skip
    args = parser.parse_args()
    if datasets.folder() is None:
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


def run(spark: Any, name: str, args: Any) -> None:
    from sparkdl import SparkModel

    load, make, metric, epochs, batch = TASKS[name]
    x, y, x_test, y_test = load()
    plain = make()
    started = time.perf_counter()
    plain.fit(x, y, batch_size=batch, epochs=epochs, verbose=0)
    seconds = time.perf_counter() - started
    base = plain.evaluate(x_test, y_test, verbose=0, return_dict=True)
    rows = [
        ["plain Keras", "1", f"{base[metric]:.4f}", "", f"{base['loss']:.4f}", f"{seconds:.1f}"]
    ]
    print(f"\n{name}: {len(x)} rows, {epochs} epochs, batch {batch}", flush=True)
    for workers in args.workers:
        frame = make_frame(spark, x, y, workers)
        for case in args.case:
            mode, frequency, rule = [*case.split(":"), "", ""][:3]
            spark_model = SparkModel(
                make(), mode, int(frequency) if frequency.isdigit() else frequency or "auto",
                num_workers=workers, batch_size=batch, rule=rule or None,
            )  # fmt: skip
            share = batch // workers if mode == "synchronous" else batch
            started = time.perf_counter()
            spark_model.fit(frame, epochs=epochs, batch_size=share, verbose=0)
            seconds = time.perf_counter() - started
            result = spark_model.model.evaluate(x_test, y_test, verbose=0, return_dict=True)
            rows.append([
                case, str(workers), f"{result[metric]:.4f}",
                f"{100 * (result[metric] - base[metric]):+.2f}", f"{result['loss']:.4f}",
                f"{seconds:.1f}",
            ])  # fmt: skip
            print("  ", *rows[-1], flush=True)
        frame.unpersist()
    print(workload.table(
        ["mode", "workers", f"test {metric}", "points from Keras", "test loss", "seconds"], rows
    ))  # fmt: skip


def make_frame(spark: Any, x: Any, y: Any, workers: int) -> Any:
    import pyarrow as pa

    flat = x.reshape(len(x), -1)
    table = pa.table(
        {"features": pa.array([row.tobytes() for row in flat], pa.binary()), "label": pa.array(y)}
    )
    frame = spark.createDataFrame(table).repartition(workers).cache()
    frame.count()
    return frame


if __name__ == "__main__":
    main()
