"""This Python environment as an archive for executors, and the line that submits with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace

from sparkdl.errors import ConfigError, ResourceError

WORKER_MB = 1536
"""Memory of a Python worker with a framework and a small model."""
_ERROR_CHARS = 2000


def pack(output: str) -> None:
    """Packs the environment of this process with venv-pack, or with conda-pack where it is conda's.

    Args:
        output: The archive to write, ``.tar.gz`` or ``.zip``; an existing one is replaced.

    Raises:
        ResourceError: This is no environment, the packing program is missing, or it failed.
    """
    conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
    tool = "conda-pack" if conda else "venv-pack"
    if not conda and sys.prefix == sys.base_prefix:
        raise ResourceError(
            "there is no environment to pack",
            expected="the Python of a virtual environment or of conda",
            received=sys.executable,
            hint="python3 -m venv env && env/bin/pip install 'sparkdl-keras[tensorflow]' venv-pack",
        )
    program = shutil.which(tool, path=os.pathsep.join([_scripts(), os.environ.get("PATH", "")]))
    if program is None:
        raise ResourceError(
            "the environment cannot be packed", expected=f"the program {tool}",
            received="no such program", hint=f"{sys.executable} -m pip install {tool}",
        )  # fmt: skip
    command = [program, "--prefix", sys.prefix, "--output", output, "--force"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise ResourceError(
            f"{tool} failed", expected="an archive", received=ran.stderr.strip()[-_ERROR_CHARS:],
            hint="it refuses packages that were installed with pip install -e",
        )  # fmt: skip


def submit_line(given: Namespace) -> str:
    """The shell lines that submit ``sparkdl train`` with the archive.

    Raises:
        ConfigError: A standalone cluster starts no driver that is Python.
    """
    if given.target == "standalone" and given.deploy_mode == "cluster":
        raise ConfigError(
            "a standalone cluster cannot run the driver",
            expected="--deploy-mode client: Spark refuses Python drivers in cluster mode there",
            received="--for standalone --deploy-mode cluster",
            hint="submit with --deploy-mode client on a machine that the workers reach; YARN "
            "(--for yarn) and Kubernetes run the driver on the cluster",
        )
    overhead = given.executor_cores * (WORKER_MB + given.memory_budget_mb)
    python = ["--conf spark.pyspark.python=./environment/bin/python"]
    if given.deploy_mode == "client":
        python.append(f"--conf spark.pyspark.driver.python={sys.executable}")
    if given.target == "yarn":
        where = f"--master yarn --deploy-mode {given.deploy_mode}"
        size = f"--num-executors {given.num_executors} --executor-cores {given.executor_cores}"
    else:
        where = f"--master spark://MASTER:7077 --deploy-mode {given.deploy_mode}"
        cores = given.num_executors * given.executor_cores
        size = f"--total-executor-cores {cores} --executor-cores {given.executor_cores}"
    lines = [
        f"spark-submit {where} \\",
        f"  --archives {given.output}#environment \\",
        *(f"  {setting} \\" for setting in python),
        f"  {size} --executor-memory 2g \\",
        f"  --conf spark.executor.memoryOverhead={overhead}m \\",
        "  $(sparkdl path) train MODEL --data PATH --output PATH",
    ]
    return "\n".join(lines)


def _scripts() -> str:
    return os.path.dirname(sys.executable)
