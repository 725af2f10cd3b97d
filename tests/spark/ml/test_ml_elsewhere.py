"""The cases in one process and on Spark Connect; files go from classic to Connect and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import PipelineModel
from stage_cases import X, quick, table

SCRIPT = Path(__file__).parent / "scripts" / "run_cases.py"


def run(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK_"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ALL CASES OK" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_in_one_process() -> None:
    run("local[2]", "", "")


@pytest.mark.slow
def test_on_connect_and_back(spark: Any, tmp_path: Path) -> None:
    fitted = quick(epochs=1).fit(table(spark))
    PipelineModel([fitted]).save(f"{tmp_path}/classic")
    shown = run("connect", f"{tmp_path}/classic", f"{tmp_path}/connect")
    told = dict(line.split() for line in shown.splitlines() if line.startswith(("read", "wrote")))
    assert told["read"] == fitted.model.predict(X, verbose=0).tobytes().hex()[:64]
    back = PipelineModel.load(f"{tmp_path}/connect").stages[-1]
    assert told["wrote"] == back.model.predict(X, verbose=0).tobytes().hex()[:64]
