"""Run by test_horovod_runner.py: functions on a cluster whose discovery script invents GPUs."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def main() -> None:
    from pyspark.sql import SparkSession

    import sparkdl

    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "gpus.sh")
        with open(script, "w") as file:
            addresses = ", ".join(f'"GPU-{c * 8}"' for c in "abcd")
            file.write(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
        os.chmod(script, 0o755)
        spark = (
            SparkSession.builder.master("local-cluster[1,2,2048]")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.worker.resource.gpu.amount", "4")
            .config("spark.worker.resource.gpu.discoveryScript", script)
            .config("spark.executor.resource.gpu.amount", "4")
            .config("spark.executor.resource.gpu.discoveryScript", script)
            .config("spark.task.resource.gpu.amount", "2")
            .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")

        def look(framework: bool = False) -> Any:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            if framework:
                import torch  # noqa: F401
            return seen, os.getpid()

        def run(*args: Any, use_gpu: Any = "auto") -> tuple[list[str], set[int]]:
            told = sparkdl.run(look, args, num_workers=2, communicator="builtin", use_gpu=use_gpu)
            print(told)
            return sorted(seen for seen, _ in told), {pid for _, pid in told}

        given = sorted(f"GPU-{c * 8}" for c in "abcd")
        try:
            seen, pids = run()
            assert sorted(",".join(seen).split(",")) == given, seen
            seen, again = run(True)  # now the workers run a framework on these GPUs
            assert sorted(",".join(seen).split(",")) == given, seen
            seen, others = run(use_gpu=False)
            assert seen == ["-1", "-1"], seen
            assert not others & again, "a worker that sees GPUs must not run it"
            probe = spark.range(0, 2, 1, 2).rdd.mapPartitions(
                lambda _: [os.environ.get("CUDA_VISIBLE_DEVICES")]
            )
            assert set(probe.collect()) == {None}
            assert pids
        finally:
            spark.stop()
    print("GPU-RUN-OK")


if __name__ == "__main__":
    main()
