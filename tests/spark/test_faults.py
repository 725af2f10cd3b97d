"""Some cells of the fault matrix, each with a driver and a cluster of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "cell",
    ["kill-driver/mid/allreduce", "kill-jvm/mid/asynchronous", "stopped-context/mid/synchronous"],
)
def test_a_cell_holds(cell: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--results", str(tmp_path / "results"), "--only", cell],
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
