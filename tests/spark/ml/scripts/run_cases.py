"""Run by test_ml_elsewhere.py in a process of its own: the cases in one process, or on Connect."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
FOLDER = Path(__file__).resolve().parents[1]
ROOT = FOLDER.parents[2]
os.environ["PYTHONPATH"] = f"{ROOT}:{FOLDER}"
sys.path[:0] = [str(ROOT), str(FOLDER), str(FOLDER.parent / "scripts")]


def main(where: str, read: str, write: str) -> None:
    """Runs all cases.

    Args:
        where: The master: ``local[2]``, or ``connect``.
        read: A saved pipeline model to load, or ``''``.
        write: Where to save a pipeline model, or ``''``.
    """
    from connect_port import own_port
    from pyspark.ml import PipelineModel
    from pyspark.sql import SparkSession
    from stage_cases import quick, run_all, table, weights_digest

    builder = SparkSession.builder
    if where == "connect":
        builder = builder.remote("local-cluster[2,1,2048]")
        builder = builder.config("spark.connect.grpc.binding.port", own_port())
    else:
        builder = builder.master(where)
    spark = (
        builder.config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .getOrCreate()
    )
    try:
        if read:
            model = PipelineModel.load(read).stages[-1]
            print("read", weights_digest(model), flush=True)
        if write:
            fitted = quick(epochs=2).fit(table(spark))
            print("wrote", weights_digest(fitted), flush=True)
            PipelineModel([fitted]).write().overwrite().save(write)
            PipelineModel([fitted]).write().overwrite().save(write)
        run_all(spark)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
