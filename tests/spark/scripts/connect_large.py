"""Run by test_large_models.py in a process of its own: a large model through Spark Connect."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
os.environ["PYTHONPATH"] = ROOT
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests", "spark")]


def check_that_the_stage_runs_once(spark: Any) -> None:
    """The pieces come from the disk, not from another training."""
    from sparkdl.launch.task import RESULT_SCHEMA, Result, join
    from sparkdl.spark.runs.launcher import collect_in_pieces

    with tempfile.TemporaryDirectory() as folder:

        def work(batches: Any) -> Any:
            from pyspark import BarrierTaskContext

            rank = BarrierTaskContext.get().partitionId()
            list(batches)
            with open(os.path.join(folder, f"rank-{rank}"), "a") as file:
                file.write("ran\n")
            for kind in ("done", "state"):
                yield from Result(rank, kind, "text", bytes([rank]) * (9 << 20)).batches()

        frame = spark.range(10).repartition(2)
        rows = collect_in_pieces(frame.mapInArrow(work, RESULT_SCHEMA, barrier=True))
        found = {(r.rank, r.kind): r.content for r in join(rows)}
        assert {key: (len(v), v[:1]) for key, v in found.items()} == {
            (rank, kind): (9 << 20, bytes([rank])) for rank in (0, 1) for kind in ("done", "state")
        }
        for name in ("rank-0", "rank-1"):
            with open(os.path.join(folder, name)) as file:
                assert file.read() == "ran\n"


def main() -> None:
    import numpy as np
    from connect_port import own_port
    from large_models import frame_of, large_model
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel
    from sparkdl.spark.runs import launcher

    spark = (
        SparkSession.builder.remote("local-cluster[2,1,1536]")
        .config("spark.connect.grpc.binding.port", own_port())
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", ROOT)
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .config("spark.driver.maxResultSize", "5m")  # the state has 6.4 MB
        .config("spark.connect.grpc.maxInboundMessageSize", str(4 << 20))  # so has the archive
        .getOrCreate()
    )
    launcher.FILE_BYTES, launcher.RESULT_BYTES = 1 << 20, 4 << 20
    check_that_the_stage_runs_once(spark)
    try:
        model = large_model()
        before = model.get_weights()
        fitted = SparkModel(model, "allreduce", communicator="builtin", num_workers=2, batch_size=8)
        history = fitted.fit(frame_of(spark), epochs=2, verbose=0).history["loss"]
        assert history[1] < history[0], history
        for weight, after in zip(before, model.get_weights(), strict=True):
            assert np.abs(after - weight).max() > 1e-3
        assert int(model.optimizer.iterations) == 2 * 4, model.optimizer.iterations
        moments = [v.numpy() for v in model.optimizer.variables if v.shape == (4096, 128)]
        assert min(np.abs(moment).max() for moment in moments) > 0
        print("LARGE OK")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
