"""Run by test_program.py: groups that ask for GPUs, which a discovery script invents."""

from __future__ import annotations

import os
import sys
import tempfile

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def main() -> None:
    from pyspark.sql import SparkSession

    from sparkdl.program import Program, PyNode, launch

    def seen() -> list[str]:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    program = Program("gpus")
    with program.group("learner", gpus=2):
        program.add_node(PyNode(seen))
    with program.group("actor", gpus=1, restarts=1):
        program.add_node(PyNode(seen))
    program.add_node(PyNode(seen), label="rest")
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "gpus.sh")
        with open(script, "w") as file:
            addresses = ", ".join(f'"GPU-{c * 8}"' for c in "abcdef")
            file.write(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
        os.chmod(script, 0o755)
        spark = (
            SparkSession.builder.master("local-cluster[1,3,2048]")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.worker.resource.gpu.amount", "6")
            .config("spark.worker.resource.gpu.discoveryScript", script)
            .config("spark.executor.resource.gpu.amount", "6")
            .config("spark.executor.resource.gpu.discoveryScript", script)
            .config("spark.task.resource.gpu.amount", "1")
            .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")
        try:
            with launch(program, "spark", spark=spark) as launched:
                (learner,) = launched.results("learner", 120)
                (actor,) = launched.results("actor")
                (rest,) = launched.results("rest")
        finally:
            spark.stop()
    print(learner, actor, rest)
    assert len(learner) == 2, "as many as the group asks for"
    assert len(actor) == 1, "not as many as the learner's task"
    assert rest == ["-1"], "none where another group asks for some"
    assert len({*learner, *actor}) == 3, "no GPU twice"
    print("GPU-PROGRAM-OK")


if __name__ == "__main__":
    main()
