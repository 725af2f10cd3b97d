"""The lines of ``docs/clusters.md`` that can run here, taken from the page and run.

A standalone cluster: a master and two workers, each a process of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters_page import ROOT, blocks, build_wheel, doctor_block, run_block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of the page, for a standalone cluster that runs."""
    import pyspark

    folder = tmp_path_factory.mktemp("standalone")
    home = Path(pyspark.__file__).parent
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": str(ROOT), "SPARK_WORKER_DIR": str(folder / "work"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    master = f"spark://127.0.0.1:{port}"
    classes = "org.apache.spark.deploy."
    commands = [
        [f"{classes}master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    ]
    worker = [f"{classes}worker.Worker", "--host", "127.0.0.1", "--webui-port", "0",
              "--cores", "1", "--memory", "1g", master]  # fmt: skip
    commands += [worker, worker]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 3))
    table = {name: x[:, i] for i, name in enumerate("abc")} | {"y": x @ [1.0, -2.0, 3.0]}
    pq.write_table(pa.table(table), folder / "rows.parquet")
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context(open(folder / f"{number}.log", "wb"))
            process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), *command], env=environment, stdout=log,
                stderr=log,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
        deadline = time.monotonic() + 120
        while (folder / "0.log").read_text().count("Registering worker") < 2:
            assert time.monotonic() < deadline, (folder / "0.log").read_text()[-2000:]
            time.sleep(0.2)
        yield environment | {
            "MASTER": master, "PYTHON": sys.executable, "PYSPARK_PYTHON": sys.executable,
            "MODEL": f"{ROOT}/tests/spark/scripts/cli_model.py:make",
            "DATA": str(folder / "rows.parquet"), "FOLDER": str(folder),
        }  # fmt: skip


def _run(block: str, variables: dict[str, str]) -> str:
    return run_block(block, variables, Path(variables["FOLDER"]))


def test_doctor_on_a_standalone_cluster(shell: dict[str, str]) -> None:
    shown = _run(doctor_block(), shell)
    assert "error " not in shown
    assert "slots" in shown


def test_standalone_lines(shell: dict[str, str]) -> None:
    train, predict = blocks("Standalone")
    _run(train, shell)
    assert (Path(shell["FOLDER"]) / "model.keras").exists()
    assert list((Path(shell["FOLDER"]) / "checkpoints").iterdir())
    _run(predict, shell)
    rows = pq.read_table(Path(shell["FOLDER"]) / "predictions")
    assert rows.num_rows == 128
    assert "prediction" in rows.column_names


def test_archive_lines(tmp_path: Path) -> None:
    """An environment as the page makes it; no dependencies, which have two gigabytes."""
    pytest.importorskip("setuptools")
    wheels = build_wheel(tmp_path)
    if wheels is None:
        pytest.skip("venv-pack cannot be installed")
    variables = {**os.environ, "PIP_FIND_LINKS": str(wheels), "PIP_NO_DEPS": "1"}
    variables.pop("PYTHONPATH", None)
    (block,) = blocks("An environment as an archive")
    told = run_block(block, variables, tmp_path)
    assert "--master yarn --deploy-mode cluster" in told
    assert "--archives env.tar.gz#environment" in told
    (tmp_path / "environment").mkdir()
    subprocess.run(["tar", "xzf", "env.tar.gz", "-C", "environment"], cwd=tmp_path, check=True)
    ran = subprocess.run(
        [tmp_path / "environment" / "bin" / "python", "-m", "sparkdl", "--version"],
        env=variables, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout.startswith("sparkdl "), ran.stderr
