"""A notebook of another process and environment: ``pyspark-client`` alone, no Java, no jars."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
CLIENT = "pyspark-client>=4.0"
"""Not the version of the tests: a client may be older than its server."""
_TWO = "local-cluster[2,1,1536]"


@pytest.fixture(scope="module")
def client_python() -> Path:
    """The interpreter of an environment with the client, kept for the next run.

    The framework is that of the tests: only Spark's own package is the client's.
    """
    folder = Path.home() / ".cache" / "sparkdl" / "thin-client"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        for options in (["setuptools<81", "wheel", "packaging"],
                        ["--no-deps", "--no-build-isolation", CLIENT]):  # fmt: skip
            installed = subprocess.run(
                [python, "-m", "pip", "install", "-q", "--retries", "1", *options],
                capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            if installed.returncode:
                pytest.skip(f"pyspark-client cannot be installed: {installed.stderr[-300:]}")
        (folder / "complete").touch()
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [str(ROOT), *sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    (Path(found.stdout.strip()) / "sitecustomize.py").write_text(
        f"import sys\nsys.path += {paths!r}\n"
    )
    return python


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a Spark Connect server in another process; its parameter is the master."""
    master = getattr(request, "param", _TWO)
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
    }
    command = [
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", master,
        *(part for name, value in settings.items() for part in ("--conf", f"{name}={value}")),
        "spark-internal",
    ]  # fmt: skip
    variables = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    told = tmp_path / "server.log"
    with told.open("wb") as log:
        process = subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, told.read_text()[-3000:]
                assert time.monotonic() < deadline, told.read_text()[-3000:]
                time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def variables() -> dict[str, str]:
    """The environment of a client: nothing of Spark's, and no path to these packages."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK_"))}
    kept.pop("PYTHONPATH", None)
    return kept


def test_fit_predict_and_run(
    client_python: Path, server: str, variables: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [client_python, str(ROOT / "tests" / "spark" / "scripts" / "thin_client.py"), server],
        env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "THIN CLIENT OK" in done.stdout, done.stdout[-2000:] + done.stderr[-5000:]


@pytest.mark.parametrize(
    ("notebook", "server", "shown"),
    [
        ("01_quickstart", _TWO, "the same loss after loading: True"),
        ("02_allreduce_and_custom_loops", _TWO, "the same weights on both ranks: True"),
        ("03_write_your_own_rule", _TWO, "learned: True"),
        ("04_pipelines", _TWO, "the same probabilities after loading: True"),
        ("05_programs", "local[6]", "target reached: True"),
        ("06_find_the_best_model", _TWO, "of five models together: "),
    ],
    indirect=["server"],
)
def test_notebooks_as_they_are(
    client_python: Path, server: str, variables: dict[str, str], notebook: str, shown: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    result = tmp_path / "result.ipynb"
    done = subprocess.run(
        [client_python, str(ROOT / "tests" / "spark" / "scripts" / "thin_notebook.py"),
         str(ROOT / "notebooks" / f"{notebook}.ipynb"), str(result)],
        env={**variables, "SPARK_REMOTE": server, "TRIALS": "6"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert shown in result.read_text()
