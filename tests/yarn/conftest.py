"""A YARN cluster with HDFS for all tests of this folder, and an environment to ship to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mini_hadoop import MiniHadoop, Unavailable, spark_jars

ROOT = Path(__file__).parents[2]
SUBMIT_S = 280


@pytest.fixture(scope="session")
def hadoop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHadoop]:
    try:
        with MiniHadoop(tmp_path_factory.mktemp("hadoop")) as cluster:
            yield cluster
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment packed by ``sparkdl package``.

    A whole environment with a framework has two gigabytes; this one finds its packages where those
    of the tests are, which is possible as all nodes are this machine.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", "venv-pack", "setuptools<81"],
        capture_output=True, text=True,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"venv-pack cannot be installed: {installed.stderr[-300:]}")
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [str(ROOT), *sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    (Path(found.stdout.strip()) / "sitecustomize.py").write_text(
        f"import sys\nsys.path += {paths!r}\n"
    )
    packed = folder / "env.tar.gz"
    ran = subprocess.run(
        [python, "-m", "sparkdl", "package", "--output", packed, "--deploy-mode", "cluster"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "--archives" in ran.stdout
    return packed


@dataclass(frozen=True)
class Submitted:
    """How a submitted application ended.

    Args:
        code: Exit status of ``spark-submit``.
        output: What it printed.
        result: What the script has written as JSON; empty if nothing.
        logs: What the containers have printed.
    """

    code: int
    output: str
    result: dict[str, Any]
    logs: str


Submit = Callable[..., Submitted]


@pytest.fixture
def submit(hadoop: MiniHadoop, archive: Path, tmp_path: Path) -> Submit:
    """``spark-submit --master yarn --archives env.tar.gz#environment SCRIPT RESULT ARGUMENTS``."""

    def run(
        script: str,
        *arguments: str,
        deploy_mode: str = "cluster",
        conf: dict[str, str] | None = None,
    ) -> Submitted:
        result = tmp_path / "result.json"
        result.unlink(missing_ok=True)
        settings = {
            "spark.yarn.jars": f"local:{spark_jars()}/*",
            "spark.yarn.submit.waitAppCompletion": "true",
            "spark.executor.memoryOverhead": "2g",
            "spark.driver.memory": "1g",
            "spark.driver.memoryOverhead": "2g",
            "spark.ui.enabled": "false",
            **(conf or {}),
        }
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PYSPARK_")},
            "HADOOP_CONF_DIR": str(hadoop.conf),
            "YARN_CONF_DIR": str(hadoop.conf),
            "PYSPARK_PYTHON": "./environment/bin/python",
        }
        environment.pop("PYTHONPATH", None)  # the archive must bring everything
        if deploy_mode == "client":
            environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
            environment["PYTHONPATH"] = str(ROOT)
        command = [
            str(Path(sys.executable).parent / "spark-submit"), "--master", "yarn",
            "--deploy-mode", deploy_mode, "--archives", f"{archive}#environment",
            "--num-executors", "2", "--executor-cores", "1", "--executor-memory", "1g",
            *(part for name, value in settings.items() for part in ("--conf", f"{name}={value}")),
            script, str(result), *arguments,
        ]  # fmt: skip
        ran = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SUBMIT_S
        )
        found = json.loads(result.read_text()) if result.exists() else {}
        return Submitted(ran.returncode, ran.stdout + ran.stderr, found, _logs(hadoop))

    return run


def _logs(hadoop: MiniHadoop) -> str:
    """The ends of the containers' logs, newest last."""
    files = [f for f in hadoop.folder.rglob("std*") if f.name in ("stdout", "stderr")]
    files += hadoop.folder.rglob("prelaunch.err")
    files.sort(key=lambda file: file.stat().st_mtime)
    return "\n".join(f"== {f}\n{f.read_text(errors='replace')[-3000:]}" for f in files[-8:])
