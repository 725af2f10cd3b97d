"""``sparkdl.doctor`` on real executors: a healthy cluster, and ten planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

import sparkdl
from sparkdl import SparkDLError

pytestmark = pytest.mark.timeout(500)
ROOT = Path(__file__).parents[3]


def _can_plant() -> bool:
    """Whether this user may make mounts and networks of its own."""
    command = ["unshare", "--mount", "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    if not _can_plant():
        pytest.skip("faults are planted with unshare and mount, which need root's rights here")
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "scripts" / "doctor_faults.py")],
        env=dict(os.environ),
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _check(report: dict[str, Any], name: str) -> dict[str, str]:
    found = [check for check in report["checks"] if check["name"] == name]
    assert len(found) == 1, report
    return found[0]


def test_healthy_cluster_has_no_warning(reports: dict[str, Any]) -> None:
    report = reports["healthy"]
    assert [c for c in report["checks"] if c["status"] != "ok"] == []
    names = {c["name"] for c in report["checks"]}
    assert names >= {
        "java", "spark", "python", "packages", "backend", "slots", "dynamic allocation", "barrier",
        "driver port", "between ranks", "clocks", "addresses", "gpus", "memory", "disk", "/dev/shm",
        "checkpoints", "arrow", "horovod", "cpus",
    }  # fmt: skip
    assert "2 executors" in _check(report, "python")["found"]
    assert "2 tasks" in _check(report, "barrier")["found"]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("python", "error", "Python 3.9.1"),
        ("packages", "error", "no sparkdl"),
        ("packages", "error", "numpy 1.21.0"),
        ("driver port", "error", "Address already in use"),
        ("addresses", "error", "loopback"),
        ("slots", "error", "2, spark.task.cpus=1"),
        ("dynamic allocation", "error", "enabled=true"),
        ("/dev/shm", "warning", "MiB"),
        ("disk", "error", "No space left"),
        ("checkpoints", "error", "/proc/checkpoints"),
    ],
)
def test_planted_fault_is_named(
    reports: dict[str, Any], name: str, status: str, words: str
) -> None:
    check = _check(reports["ten faults"], name)
    assert check["status"] == status
    assert words in check["found"]
    assert check["expected"]
    assert check["hint"]


def test_all_faults_are_named_within_a_minute(reports: dict[str, Any]) -> None:
    assert reports["ten faults"]["wall_s"] < 60, "it takes 7 s"


def test_address_that_executors_do_not_reach_is_named(reports: dict[str, Any]) -> None:
    report = reports["blocked"]
    check = _check(report, "driver port")
    assert check["status"] == "error"
    assert "127.0.0.99" in check["found"]
    assert [c["name"] for c in report["checks"] if c["status"] == "error"] == ["driver port"]


def test_another_package_called_sparkdl_is_named(reports: dict[str, Any]) -> None:
    check = _check(reports["foreign package"], "packages")
    assert check["status"] == "error"
    assert "another package is called sparkdl" in check["found"]
    assert "modules-1/sparkdl is imported instead of this one" in check["found"]
    assert "spark-deep-learning" in check["hint"]


def test_report_of_a_notebook_is_a_table(spark: Any) -> None:
    x = keras.Input((3,), dtype="int64")
    rows = keras.layers.Flatten()(sparkdl.layers.ServedEmbedding(4, optimizer="adagrad")(x))
    model = keras.Model(x, keras.layers.Dense(1)(rows))
    with pytest.raises(sparkdl.errors.ModelError, match="not compiled"):
        sparkdl.doctor(spark, model=model)
    model.compile("adam", "mse")
    report = sparkdl.doctor(spark, model=model, timeout_s=60.0)
    found = {check.name: check.found for check in report.checks}
    assert "for each worker" in found["model memory"]
    assert "bytes a row" in found["tables"]
    assert report.status != "error", report
    html = report._repr_html_()
    assert html.count("<tr>") == 1 + len(report.checks)
    assert "slots" in html


def test_unknown_mode_is_refused_before_any_job(spark: Any) -> None:
    with pytest.raises(SparkDLError, match="unknown mode"):
        sparkdl.doctor(spark, mode="fast")
