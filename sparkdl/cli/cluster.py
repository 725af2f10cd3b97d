"""Commands about machines: run, doctor, env, package, path; the environment for executors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from sparkdl.cli.parser import given_settings
from sparkdl.cli.session import spark_session
from sparkdl.config import LIMITS_OF_FIT, FitConfig, Limits
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.settings.network import Network


def run(given: Namespace) -> int:
    """``sparkdl run -np N script.py``: the counterpart of ``sparkdl.run``."""
    import sparkdl

    if given.num_proc < 1:
        raise ConfigError("-np is the number of ranks", expected="1 or more",
                          received=str(given.num_proc))  # fmt: skip
    try:
        source = Path(given.script).read_bytes()
    except OSError as error:
        raise ConfigError("there is no script to run", expected="a Python file",
                          received=f"{given.script!r}: {error}") from error  # fmt: skip
    call = (source, os.path.basename(given.script), list(given.arguments))
    verbosity = "log_callback_only" if given.quiet or given.json else "all"
    if given.local:
        runner: Any = sparkdl.HorovodRunner  # its signature is that of Databricks, untyped
        ranks = runner(np=-given.num_proc, driver_log_verbosity=verbosity)
        ranks.run(run_script, source=call[0], name=call[1], arguments=call[2])
    else:
        with spark_session(given) as spark:
            sparkdl.run(
                run_script, args=call, num_workers=given.num_proc, spark=spark,
                communicator=given.communicator, backend=given.backend,
                driver_log_verbosity=verbosity,
            )  # fmt: skip
    if given.json:
        print(json.dumps({"script": given.script, "ranks": given.num_proc, "status": "done"}))
    return 0


def run_script(source: bytes, name: str, arguments: list[str]) -> None:
    """Runs a script on a rank, as ``python script.py arguments`` would.

    Raises:
        RuntimeError: The script ended with an exit status other than 0.
    """
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        exec(compile(source, name, "exec"), {"__name__": "__main__", "__file__": name})
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{name} ended with exit status {end.code}") from end
    finally:
        sys.argv = before


def doctor(given: Namespace) -> int:
    """``sparkdl doctor``: the counterpart of ``sparkdl.doctor``."""
    import sparkdl

    with spark_session(given) as spark:
        report = sparkdl.doctor(
            spark,
            **given_settings(given, FitConfig, ("mode", "num_workers")),
            network=Network(**given_settings(given, Network)),
            limits=Limits(**given_settings(given, Limits, LIMITS_OF_FIT)),
            checkpoint_dir=given.checkpoint_dir,
            timeout_s=given.timeout,
        )
    print(json.dumps(report.to_dict()) if given.json else report)
    return 3 if report.status == "error" else 0


def env(given: Namespace) -> int:
    """``sparkdl env``: what this process knows of its Python, its packages and its machine."""
    import sparkdl

    facts = sparkdl.environment()
    if given.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None) or "none"
        print(f"{name:<12} {'none' if value is None else value}")
    return 0


def package(given: Namespace) -> int:
    """``sparkdl package``: the environment as an archive, and the line that submits with it."""
    archive, files = None, list[str]()
    if given.target == "kubernetes":  # there the environment is in the image
        given.output = given.output or "kubernetes"
        line = kubernetes_line(given)
        if not given.dry_run:
            files = write_manifests(given.output, given.namespace)
    else:
        given.output = given.output or "env.tar.gz"
        line = submit_line(given)
        if not given.dry_run:
            pack(given.output)
            archive = given.output
    made = {"archive": archive, "files": files, "submit": line}
    print(json.dumps(made) if given.json else line)
    return 0


def path(given: Namespace) -> int:
    """``sparkdl path``: the file that spark-submit runs."""
    import sparkdl

    file = os.path.join(os.path.dirname(os.path.abspath(sparkdl.__file__)), "__main__.py")
    print(json.dumps({"path": file}) if given.json else file)
    return 0


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
            expected="the Python of a virtual environment or of conda", received=sys.executable,
            hint="python3 -m venv env && env/bin/pip install 'sparkdl-keras[tensorflow]' venv-pack",
        )  # fmt: skip
    scripts = os.path.dirname(sys.executable)
    program = shutil.which(tool, path=os.pathsep.join([scripts, os.environ.get("PATH", "")]))
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


SERVICE = "sparkdl-driver"
DRIVER_PORT, BLOCK_PORT, SERVER_PORT = 7078, 7079, 7077
"""The ports of Spark's driver, of its blocks, and of the parameter server or the coordinator."""
ENTRY_FILE = "/opt/sparkdl/main.py"
"""The path that ``sparkdl path`` prints in the image: ``docker/Dockerfile`` links it there."""
SHARED_MB = 1024


def write_manifests(folder: str, namespace: str) -> list[str]:
    """Writes ``driver.yaml``, ``executor.yaml`` and ``service.yaml``; existing ones are replaced.

    Returns:
        Their paths.
    """
    values = {
        "shared_mb": SHARED_MB, "namespace": namespace, "service": SERVICE,
        "driver_port": DRIVER_PORT, "block_port": BLOCK_PORT, "server_port": SERVER_PORT,
    }  # fmt: skip
    os.makedirs(folder, exist_ok=True)
    paths = []
    for name in ("driver.yaml", "executor.yaml", "service.yaml"):
        text = resources.files("sparkdl.cli").joinpath("manifests", name).read_text()
        paths.append(os.path.join(folder, name))
        Path(paths[-1]).write_text(Template(text).substitute(values))
    return paths


def kubernetes_line(given: Namespace) -> str:
    """The shell lines that submit ``sparkdl train``.

    Args:
        given: ``output`` (the folder of the manifests), ``image``, ``namespace``, ``deploy_mode``,
            ``num_executors``, ``executor_cores`` and ``memory_budget_mb``.

    Raises:
        ConfigError: No image was named.
    """
    if not given.image:
        raise ConfigError(
            "pods need an image", expected="--image REGISTRY/sparkdl:VERSION",
            received="no --image", hint="docker build -f docker/Dockerfile builds one",
        )  # fmt: skip
    overhead = given.executor_cores * (WORKER_MB + given.memory_budget_mb) + SHARED_MB
    settings = {
        "spark.kubernetes.container.image": given.image,
        "spark.kubernetes.namespace": given.namespace,
        "spark.kubernetes.executor.podTemplateFile": f"{given.output}/executor.yaml",
        "spark.executor.instances": given.num_executors,
        "spark.executor.cores": given.executor_cores,
        "spark.executor.memory": "2g",
        "spark.executor.memoryOverhead": f"{overhead}m",
    }
    if given.deploy_mode == "cluster":
        settings |= {
            "spark.kubernetes.driver.podTemplateFile": f"{given.output}/driver.yaml",
            "spark.kubernetes.authenticate.driver.serviceAccountName": "spark",
            "spark.driver.memory": "2g",
            "spark.driver.memoryOverhead": f"{WORKER_MB}m",
        }
        before: list[str] = []
        script, more = f"local://{ENTRY_FILE}", ""
    else:
        host = f"{SERVICE}.{given.namespace}.svc"
        settings |= {
            "spark.driver.host": host,
            "spark.driver.bindAddress": "0.0.0.0",
            "spark.driver.port": DRIVER_PORT,
            "spark.driver.blockManager.port": BLOCK_PORT,
        }
        before = [
            f"kubectl apply -f {given.output}/service.yaml",
            'kubectl label pod "$HOSTNAME" sparkdl-driver=true   # the pod that this runs in',
        ]
        script = "$(sparkdl path)"
        more = f" --port {SERVER_PORT} --server-bind 0.0.0.0 --server-address {host}"
    lines = [
        f"spark-submit --master k8s://https://HOST:6443 --deploy-mode {given.deploy_mode} \\",
        *(f"  --conf {name}={value} \\" for name, value in settings.items()),
        f"  {script} train MODEL --data PATH --output PATH{more}",
    ]
    return "\n".join([*before, *lines])
