"""Which Spark and Java a process would start."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

import sparkdl
from sparkdl.diagnosis.examination import java_version, spark_version


def test_the_environment_tells_spark_and_java() -> None:
    facts = sparkdl.environment()
    assert facts["spark"] == spark_version()
    assert facts["java"] == java_version()


def test_spark_of_spark_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert spark_version() == pyspark.__version__
    (tmp_path / "RELEASE").write_text("Spark 4.0.9 (git revision 1) built for Hadoop 3\n")
    assert spark_version() == f"{pyspark.__version__}, in SPARK_HOME 4.0.9"


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 'openjdk version \"17.0.12\" 2024-07-16' >&2", "17.0.12"), ("exit 3", "none")],
)
def test_java_of_java_home(
    script: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "java"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert str(java_version()).startswith(version)


def test_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    assert java_version() is None
