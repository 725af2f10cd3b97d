"""Manifests for Kubernetes against the API's schemas, and the image's entry point."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clusters_page import blocks, run_block

from sparkdl import cli
from sparkdl.cli.cluster import ENTRY_FILE, kubernetes_line, write_manifests
from sparkdl.cli.parser import make_parser
from sparkdl.errors import ConfigError

ROOT = Path(__file__).parents[3]
ENTRY = ROOT / "docker" / "entrypoint.sh"
IMAGE = ("--image", "registry/sparkdl:1")


def check(manifest: dict[str, Any], kind: str) -> None:
    """Fails for a field that the API does not have, that it requires, or of another type."""
    models = pytest.importorskip("kubernetes.client.models")
    if not hasattr(models, kind) or not hasattr(getattr(models, kind), "model_validate"):
        pytest.skip("the models of kubernetes 37 or newer check what they are given")
    checked = getattr(models, kind).model_validate(manifest)
    assert checked.model_dump(by_alias=True, exclude_none=True) == manifest


@pytest.mark.parametrize(
    ("name", "kind"),
    [("driver.yaml", "V1Pod"), ("executor.yaml", "V1Pod"), ("service.yaml", "V1Service")],
)
def test_manifests_fit_the_schemas_of_the_api(tmp_path: Path, name: str, kind: str) -> None:
    yaml = pytest.importorskip("yaml")
    (path,) = [one for one in write_manifests(str(tmp_path), "team") if one.endswith(name)]
    manifest = yaml.safe_load(Path(path).read_text())
    assert (manifest["apiVersion"], f"V1{manifest['kind']}") == ("v1", kind)
    check(manifest, kind)


def test_a_field_that_the_api_lacks_is_found() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "one"}]}}
    check(pod, "V1Pod")
    pod["spec"]["volume"] = []  # type: ignore[index]
    with pytest.raises(ValueError, match="volume"):
        check(pod, "V1Pod")


def _line(*arguments: str) -> str:
    given = make_parser().parse_args(["package", "--kubernetes", "--output", "k", *arguments])
    return kubernetes_line(given)


def test_driver_in_the_cluster() -> None:
    line = _line(*IMAGE, "--deploy-mode", "cluster", "--executor-cores", "2")
    assert "--deploy-mode cluster" in line
    assert "spark.kubernetes.driver.podTemplateFile=k/driver.yaml" in line
    assert "spark.kubernetes.executor.podTemplateFile=k/executor.yaml" in line
    assert "spark.executor.memoryOverhead=8192m" in line  # 2 * (1536 + 2048) and /dev/shm
    assert f"local://{ENTRY_FILE} train" in line


@pytest.mark.processes
def test_file_that_the_line_names_is_in_the_image(tmp_path: Path) -> None:
    """The image's own line makes it, run here; the file is started as Spark starts it."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    _, _, runtime = dockerfile.partition("AS runtime\n")
    (making,) = re.findall(rf"^RUN (.* {ENTRY_FILE})$", runtime, re.MULTILINE)
    program = tmp_path / "sparkdl"  # what pip installs
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sparkdl "$@"\n')
    program.chmod(0o755)
    made = tmp_path / "main.py"
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    }  # fmt: skip
    run = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    subprocess.run(["sh", "-euc", making.replace(ENTRY_FILE, str(made))], check=True, **run)
    assert subprocess.run([sys.executable, made, "--version"], check=True, **run).stdout


def test_driver_in_a_pod_of_the_users_own() -> None:
    line = _line(*IMAGE, "--namespace", "team")
    assert "kubectl apply -f k/service.yaml" in line
    assert "spark.driver.host=sparkdl-driver.team.svc" in line
    assert "--port 7077 --server-bind 0.0.0.0 --server-address sparkdl-driver.team.svc" in line


@pytest.mark.processes
def test_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """``docs/clusters.md``: its first block is run, and prints its second one."""
    command, shown = blocks("Kubernetes")
    program = tmp_path / "sparkdl"  # what pip installs
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sparkdl "$@"\n')
    program.chmod(0o755)
    variables = {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    }  # fmt: skip
    assert run_block(command, variables, tmp_path) == shown
    written = {str(path.relative_to(tmp_path)) for path in (tmp_path / "kubernetes").iterdir()}
    assert written == {f"kubernetes/{name}.yaml" for name in ("driver", "executor", "service")}


def test_pods_need_an_image() -> None:
    with pytest.raises(ConfigError, match="pods need an image"):
        _line()


def test_command_writes_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["package", "--for", "kubernetes", "--json", *IMAGE]) == cli.OK
    told = json.loads(capsys.readouterr().out)
    assert told["archive"] is None
    assert [Path(file).name for file in told["files"]] == [
        "driver.yaml",
        "executor.yaml",
        "service.yaml",
    ]
    assert all((tmp_path / file).exists() for file in told["files"])


def _entry(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """What the image's entry point executes, as a program of that name would see it."""
    for name in ("java", "spark/bin/spark-submit"):
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text('#!/bin/bash\nprintf "%s\\n" "$(basename "$0")" "$@"\n')
        program.chmod(0o755)
    environment = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SPARK_HOME": str(folder / "spark"),
        **variables,
    }  # fmt: skip
    ran = subprocess.run(
        ["bash", ENTRY, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.splitlines()


def test_entry_point_of_a_driver(tmp_path: Path) -> None:
    started = _entry(tmp_path, "driver", "--class", "x y", SPARK_DRIVER_BIND_ADDRESS="10.0.0.1")
    assert started == [
        "spark-submit", "--deploy-mode", "client",
        "--conf", "spark.driver.bindAddress=10.0.0.1", "--class", "x y",
    ]  # fmt: skip


def test_entry_point_of_an_executor(tmp_path: Path) -> None:
    started = _entry(
        tmp_path, "executor", SPARK_JAVA_OPT_0="-Da=b c", SPARK_JAVA_OPT_1="-Dd=e",
        SPARK_EXECUTOR_MEMORY="2g", SPARK_DRIVER_URL="spark://d", SPARK_EXECUTOR_ID="3",
        SPARK_EXECUTOR_CORES="1", SPARK_APPLICATION_ID="app", SPARK_EXECUTOR_POD_IP="10.0.0.2",
        SPARK_RESOURCE_PROFILE_ID="0", SPARK_EXECUTOR_POD_NAME="pod-3",
    )  # fmt: skip
    assert started[:5] == ["java", "-Da=b c", "-Dd=e", "-Xms2g", "-Xmx2g"]
    assert f"{tmp_path}/spark/jars/*" in started[6]
    told = dict(zip(started[8::2], started[9::2], strict=True))
    assert told["--executor-id"] == "3"
    assert told["--podName"] == "pod-3"


def test_entry_point_of_any_command(tmp_path: Path) -> None:
    assert _entry(tmp_path, "echo", "a  b") == ["a  b"]
