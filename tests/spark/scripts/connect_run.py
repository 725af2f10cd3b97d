"""Run by test_horovod_runner.py: functions on every rank over Spark Connect."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def main() -> None:
    from unittest import mock

    import keras
    import numpy as np
    import pytest
    from connect_port import own_port
    from pyspark.sql import SparkSession

    import sparkdl
    from sparkdl.errors import ResourceError, WorkerError

    spark = (
        SparkSession.builder.remote("local-cluster[2,1,2048]")
        .config("spark.connect.grpc.binding.port", own_port())
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .getOrCreate()
    )

    def work() -> Any:
        communicator = sparkdl.communicator()
        print(f"printed {communicator.rank}")
        sparkdl.log_to_driver(f"logged {communicator.rank}")
        total = communicator.all_reduce(np.ones(2), "sum")
        return communicator.rank, float(total[0]), np.zeros(2_000_000, np.float32)

    def fail() -> None:
        communicator = sparkdl.communicator()
        if communicator.rank == 1:
            raise ValueError("bad row 17")
        time.sleep(60)

    try:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            told = sparkdl.run(work, num_workers=2, communicator="builtin")
        assert [t[:2] for t in told] == [(0, 2.0), (1, 2.0)], told
        assert told[1][2].nbytes == 8_000_000
        for rank in range(2):
            assert f"[rank {rank}] printed {rank}\n" in printed.getvalue(), printed.getvalue()
            assert f"[rank {rank}] logged {rank}\n" in printed.getvalue()
        report = sparkdl.doctor(spark, num_workers=2, timeout_s=60.0)
        assert {c.name: c.status for c in report.checks if c.status != "ok"} == {}, report
        assert "2 executors" in report.named("python").found
        assert "2 tasks" in report.named("barrier").found
        began = time.monotonic()
        with pytest.raises(WorkerError, match="bad row 17") as caught:
            sparkdl.run(fail, num_workers=2, communicator="builtin")
        assert caught.value.rank == 1
        assert 'raise ValueError("bad row 17")' in str(caught.value)
        assert time.monotonic() - began < 15
        with pytest.raises(ResourceError, match="2 slots"):
            sparkdl.run(work, num_workers=3)
        assert sparkdl.HorovodRunner(np=2).run(work)[:2] == (0, 2.0)

        # a driver on another machine, whose address this client cannot listen on
        frame = spark.createDataFrame([([1.0], 1.0)] * 8, "features array<float>, label float")
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with mock.patch("sparkdl.spark.runs.resources._can_bind", return_value=False):
            for mode in ("asynchronous", "hogwild", "synchronous"):
                began = time.monotonic()
                with pytest.raises(ResourceError, match="mode='allreduce' works from here"):
                    sparkdl.SparkModel(model, mode, num_workers=2).fit(frame, verbose=0)
                assert time.monotonic() - began < 20, "before any training"
    finally:
        spark.stop()
    print("CONNECT-RUN-OK")


if __name__ == "__main__":
    main()
