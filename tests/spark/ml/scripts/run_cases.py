"""Run by test_ml_elsewhere.py in a process of its own: the cases on any master, or on Connect."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
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
        where: The master: ``local[2]``, ..., or ``connect``.
        read: A folder of saved stages to load, or ``''``.
        write: A folder for saved stages, or ``''``.
    """
    from connect_port import own_port
    from pyspark.sql import SparkSession
    from saved_stages import read_all, write_all
    from stage_cases import quick, run_all, table

    builder = SparkSession.builder
    if where == "connect":
        builder = builder.remote("local-cluster[2,1,2048]")
        builder = builder.config("spark.connect.grpc.binding.port", own_port())
    else:
        builder = builder.master(where)
    mounted = tempfile.mkdtemp()
    spark = (
        builder.config("spark.driver.host", "127.0.0.1")
        .config("spark.hadoop.fs.viewfs.mounttable.test.link./models", f"file:{mounted}")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .getOrCreate()
    )
    try:
        if read:
            print("read", json.dumps(read_all(read)), flush=True)
        if write:
            fitted = quick(epochs=2).fit(table(spark))
            print("wrote", json.dumps(write_all(fitted, write, seed=2)), flush=True)
            told = write_all(fitted, "viewfs://test/models", seed=3)
            assert read_all("viewfs://test/models") == told
            assert {path.name for path in Path(mounted).iterdir()} == set(told)
            shutil.rmtree(mounted)
        run_all(spark)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
