"""Each benchmark of rules and scale runs, on little data, and prints its tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import workload  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(workload.folder() is None, reason="MNIST and a9a are not here"),
]


def run(script: str, *arguments: str, quick: str = "--quick") -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *filter(None, [quick]), *arguments],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_rules(tmp_path: Path) -> None:
    options = ["--seeds", "1", "--workers", "2", "--results", str(tmp_path / "lines.jsonl")]
    told = run("rules.py", "--only", "downpour", "bsp", "diloco", "mean", "sliced", *options)
    rows = [line for line in told.splitlines() if line.startswith("| ")]
    # two tasks: header, plain Keras, the server's and the all-reduce rules of these names, and
    # three of them with another window
    assert len(rows) == 2 * (1 + 1 + 3 + 4 + 3), told
    assert "x2" not in run("rules.py", "--only", "downpour", "bsp", "diloco", "mean", "sliced",
                           *options)  # nothing is run again  # fmt: skip


def test_scale(tmp_path: Path) -> None:
    figure = tmp_path / "scaling.svg"
    told = run("scale.py", "--plot", str(figure))
    assert "100 Gbit/s" in told
    assert figure.read_text().startswith("<?xml")


def test_searches_side_by_side() -> None:
    told = run("tune.py", "--part", "asha", "--trials", "4", quick="")
    assert told.count("points below random search's best") == 2
