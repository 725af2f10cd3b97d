"""The lines of ``docs/clusters.md`` for YARN, taken from the page and run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters_page import ROOT, blocks, run_block
from linked_environment import linked_environment
from mini_hadoop import MiniHadoop
from submitting import Submitter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_yarn_lines(submit: Submitter, hadoop: MiniHadoop, archive: Path, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.save(tmp_path / "untrained.keras")
    x = np.random.default_rng(0).normal(size=(128, 3))
    table = {name: x[:, i] for i, name in enumerate("abc")} | {"y": x @ [1.0, -2.0, 3.0]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    shutil.copy(archive, tmp_path / "env.tar.gz")
    (tmp_path / "env").symlink_to(linked_environment())
    hadoop.ask("folder", "/user/anna", "777")  # for what spark-submit stages
    hadoop.ask("folder", "/user/anna/page", "777")
    for name in ("untrained.keras", "rows.parquet"):
        hadoop.ask("put", str(tmp_path / name), f"/user/anna/page/{name}")

    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {
        **os.environ, "FOLDER": "/user/anna/page", "PATH": programs, "PYTHONPATH": str(ROOT),
        "HADOOP_CONF_DIR": str(hadoop.conf), "HADOOP_USER_NAME": "anna",
    }  # fmt: skip
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        variables.pop(name, None)
    train, predict = blocks("YARN")
    run_block(train, variables, tmp_path)
    found = hadoop.ask("list", "/user/anna/page")
    assert "model.keras" in found
    assert "checkpoints" in found
    run_block(predict, variables, tmp_path)
    assert "_SUCCESS" in hadoop.ask("list", "/user/anna/page/predictions")
