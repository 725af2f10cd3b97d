"""Two nodes on two executors of one core each, while a job feeds them: train, then inference.

It ends in a line of JSON with what the nodes saw; see test_tfos.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")


def train(args: str, ctx: Any) -> None:
    feed = ctx.get_data_feed()
    taken = 0
    while not feed.should_stop():
        taken += sum(feed.next_batch(7)) + ctx.num_workers - 2
    Path(args, f"{ctx.job_name}-{ctx.task_index}").write_text(str(taken))


def square(args: str, ctx: Any) -> None:
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        feed.batch_results([number**2 for number in feed.next_batch(7)])


def main() -> None:
    from pyspark.sql import SparkSession

    from sparkdl.compat.tfos import TFCluster

    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    sc, mode = spark.sparkContext, TFCluster.InputMode.SPARK
    with tempfile.TemporaryDirectory() as folder:
        cluster = TFCluster.run(sc, train, folder, 2, input_mode=mode)
        cluster.train(sc.parallelize([39] * 40, 4), 1)
        cluster.shutdown()
        trained = {path.name: int(path.read_text()) for path in sorted(Path(folder).iterdir())}
    cluster = TFCluster.run(sc, square, None, 2, input_mode=mode)
    squares = cluster.inference(sc.parallelize(range(40), 4)).collect()
    cluster.shutdown()
    spark.stop()
    print(json.dumps({"trained": trained, "squares": squares}))


if __name__ == "__main__":
    main()
