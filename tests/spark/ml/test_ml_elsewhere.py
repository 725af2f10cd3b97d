"""The cases in one process, on executors of one slot, on Spark Connect; files go there and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from saved_stages import read_all, write_all
from stage_cases import quick, table

SCRIPT = Path(__file__).parent / "scripts" / "run_cases.py"


def run(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK_"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True,
        timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ALL CASES OK" in done.stdout
    return done.stdout


def read_and_written(shown: str) -> dict[str, dict[str, str]]:
    """What a run of the cases said of the weights that it read and wrote."""
    lines = (line.partition(" ") for line in shown.splitlines())
    return {first: json.loads(rest) for first, _, rest in lines if first in ("read", "wrote")}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local[2]", "local-cluster[2,1,2048]", "connect"])
def test_elsewhere_and_back(where: str, spark: Any, tmp_path: Path) -> None:
    """All cases there; what was saved on executors is read there, and the other way round."""
    fitted = quick(epochs=1).fit(table(spark))
    here = write_all(fitted, f"{tmp_path}/here", seed=1)
    told = read_and_written(run(where, f"{tmp_path}/here", f"{tmp_path}/there"))
    assert told["read"] == here
    assert read_all(f"{tmp_path}/there") == told["wrote"]
    assert not set(told["read"].values()) & set(told["wrote"].values())
