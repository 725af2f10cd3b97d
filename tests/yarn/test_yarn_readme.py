"""The lines of docs/yarn.md, as they stand there: the environment, the archive, the submission."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from clusters_page import ROOT, build_wheel, run_block
from mini_hadoop import MiniHadoop, Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECTION = "## spark-submit on YARN"
_PYTHON = """#!/bin/sh
# What "python3 -m venv env" makes also finds the packages of the tests; but pip does not.
{python} "$@" || exit
for folder in env/lib/python*/site-packages; do
  echo 'import sys
if not any(one.endswith("/pip") for one in sys.orig_argv):
    sys.path += {paths}' >"$folder/sitecustomize.py"
done
"""


@pytest.fixture(scope="module")
def hadoop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHadoop]:
    """Nodes with room for the page's executors, of eight GiB each."""
    room = {"yarn.minicluster.yarn.nodemanager.resource.memory-mb": "40960"}
    try:
        with MiniHadoop(tmp_path_factory.mktemp("hadoop"), room) as cluster:
            yield cluster
    except Unavailable as missing:
        pytest.skip(str(missing))


def test_lines_of_readme(hadoop: MiniHadoop, tmp_path: Path) -> None:
    """No dependencies are installed, which have two gigabytes: the tests' packages are found."""
    pytest.importorskip("setuptools")
    section = (ROOT / "docs" / "yarn.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    wheels = build_wheel(tmp_path)
    if wheels is None:
        pytest.skip("venv-pack cannot be installed")
    programs = tmp_path / "programs"
    programs.mkdir()
    paths = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    python = programs / "python3"
    python.write_text(_PYTHON.format(python=sys.executable, paths=json.dumps(paths)))
    python.chmod(0o755)
    for name in ("spark-submit", "find-spark-home"):
        (programs / name).symlink_to(Path(sys.executable).parent / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4)).astype("float32")
    columns = {"features": list(x), "label": (x[:, 0] > 0).astype("int64")}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    hadoop.ask("folder", "/user/anna", "777")  # for what spark-submit stages
    hadoop.ask("folder", "/data", "777")
    hadoop.ask("put", str(tmp_path / "train.parquet"), "/data/train.parquet")

    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "PIP_"))}
    inherited.pop("PYTHONPATH", None)
    variables = {
        **inherited, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SPARK_HOME": str(Path(pyspark.__file__).parent), "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_DEPS": "1", "HADOOP_CONF_DIR": str(hadoop.conf), "HADOOP_USER_NAME": "anna",
    }  # fmt: skip
    run_block(block, variables, tmp_path, timeout_s=600)
    assert "m.keras" in hadoop.ask("list", "/models")
    listed = subprocess.run(
        ["tar", "tzf", "env.tar.gz"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert "sparkdl/__init__.py" in listed
    shutil.rmtree(tmp_path / "env")
