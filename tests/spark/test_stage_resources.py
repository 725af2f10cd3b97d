"""Stage-level scheduling: the tasks of a training stage ask for more than those of other stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs_spark

HERE = Path(__file__).parent
CONNECT = needs_spark(4, 0, "its packages have no Connect server")


@pytest.mark.parametrize(
    "script",
    [
        "stage_resources.py",
        pytest.param("connect_resources.py", marks=[pytest.mark.slow, CONNECT]),
    ],
)
def test_workers_take_the_cores_that_were_asked_for(script: str) -> None:
    if script.startswith("connect"):
        pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    done = subprocess.run(
        [sys.executable, str(HERE / "scripts" / script)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert "STAGE RESOURCES OK" in done.stdout, done.stdout[-2000:] + done.stderr[-5000:]
