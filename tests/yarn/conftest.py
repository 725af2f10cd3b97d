"""A YARN cluster with HDFS for all tests of this folder, and an environment to ship to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from linked_environment import linked_environment
from mini_hadoop import MiniHadoop, Unavailable
from submitting import Submitter


@pytest.fixture(scope="module")
def hadoop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHadoop]:
    try:
        with MiniHadoop(tmp_path_factory.mktemp("hadoop")) as cluster:
            yield cluster
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """:func:`linked_environment` as ``sparkdl package`` packs it."""
    packed = tmp_path_factory.mktemp("environment") / "env.tar.gz"
    python = linked_environment() / "bin" / "python"
    ran = subprocess.run(
        [python, "-m", "sparkdl", "package", "--output", packed, "--deploy-mode", "cluster"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "--archives" in ran.stdout
    return packed


@pytest.fixture
def submit(hadoop: MiniHadoop, archive: Path, tmp_path: Path) -> Submitter:
    return Submitter(hadoop, archive, tmp_path)
