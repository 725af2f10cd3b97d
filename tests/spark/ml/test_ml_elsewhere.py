"""The cases in one process and on Spark Connect; files go from classic to Connect and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import PipelineModel
from stage_cases import quick, table, weights_digest

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


def read_and_written(shown: str) -> dict[str, str]:
    """What a run of the cases said of the weights that it read and wrote."""
    return dict(line.split() for line in shown.splitlines() if line.startswith(("read", "wrote")))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local[2]", "connect"])
def test_elsewhere_and_back(where: str, spark: Any, tmp_path: Path) -> None:
    """All cases there; what was saved on executors is read there, and the other way round."""
    fitted = quick(epochs=1).fit(table(spark))
    PipelineModel([fitted]).save(f"{tmp_path}/here")
    told = read_and_written(run(where, f"{tmp_path}/here", f"{tmp_path}/there"))
    assert told["read"] == weights_digest(fitted)
    back = PipelineModel.load(f"{tmp_path}/there").stages[-1]
    assert told["wrote"] == weights_digest(back)
    assert told["read"] != told["wrote"]
    again = PipelineModel([back])
    again.write().overwrite().save(f"{tmp_path}/here")
    assert weights_digest(PipelineModel.load(f"{tmp_path}/here").stages[-1]) == told["wrote"]
