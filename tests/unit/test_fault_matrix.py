"""The fault matrix: which cells there are, and what counts as held. The cells run by themselves."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "faults.py"
GOOD = {
    "left": [], "code": 0, "outcome": "model", "accuracy": 0.99, "epochs": [8], "seconds": 30.0,
    "fired": True,
}  # fmt: skip
BAD = {"left": [], "code": 0, "outcome": "error", "seconds": 3.0, "fired": True}


@pytest.fixture(scope="module")
def faults() -> Any:
    spec = importlib.util.spec_from_file_location("faults_under_test", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


def test_the_matrix(faults: Any) -> None:
    cells = faults.all_cells()
    assert len({cell.name for cell in cells}) == len(cells) >= 92
    for victim in ("worker", "executor", "server", "driver", "jvm"):
        modes = faults.MODES[:3] if victim == "server" else faults.MODES
        of_victim = {(c.moment, c.mode) for c in cells if c.kind == f"kill-{victim}"}
        assert of_victim == {(moment, mode) for moment in faults.MOMENTS for mode in modes}


def test_what_holds(faults: Any) -> None:
    def verdict(kind: str, moment: str, **report: Any) -> str:
        return str(faults.judge(faults.Cell(kind, moment, "synchronous"), report))

    assert verdict("kill-worker", "mid", **GOOD) == "held"
    assert "accuracy" in verdict("kill-worker", "mid", **GOOD | {"accuracy": 0.5})
    assert "epochs" in verdict("kill-worker", "mid", **GOOD | {"epochs": [7]})
    assert "left behind" in verdict("kill-worker", "mid", **GOOD | {"left": ["process 1"]})
    assert "no fault came" in verdict("kill-worker", "mid", **GOOD | {"fired": False})
    assert "after the fit" in verdict("kill-worker", "mid", **GOOD | {"seconds": -0.5})
    assert "next fit" in verdict("kill-worker", "mid", **GOOD, afterwards="TransportError: x")
    assert "not the promised model" in verdict("kill-worker", "mid", **BAD, error="x")
    died = "TransportError: the parameter server's process ended\n  received: exit status -9"
    assert verdict("kill-server", "mid", **BAD, error=died) == "held"
    assert "came after" in verdict("kill-server", "mid", **BAD | {"seconds": 16}, error=died)
    assert "not the promised error" in verdict("kill-server", "mid", **BAD, error="OSError: x")
    assert "not the promised error: a model" in verdict("kill-server", "mid", **GOOD)
    assert verdict("kill-server", "end", **GOOD) == "held"
    assert "hangs" in verdict("kill-server", "end", left=[], code="hangs")
    resumed = GOOD | {"epochs": [5]}
    assert verdict("kill-driver", "mid", **resumed) == "held"
    assert "expected 5" in verdict("kill-driver", "mid", **GOOD)  # began again at 0
    cut = GOOD | {"expected_epochs": 2, "warnings": ["a checkpoint is not whole"]}
    assert verdict("truncated-checkpoints", "any", **cut | {"epochs": [2]}) == "held"
    assert "expected 2" in verdict("truncated-checkpoints", "any", **cut | {"epochs": [1]})
    assert "ended with -11" in verdict("nan", "any", left=[], code=-11)


def test_the_table_says_what_was_not_run(faults: Any, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    lines = [
        {"cell": "kill-worker/start/hogwild", "verdict": "held", **GOOD},
        {"cell": "kill-server/mid/hogwild", "verdict": "left behind", **GOOD},
        {"cell": "kill-server/mid/hogwild", "verdict": "held", "shared": True, **BAD},
        {"cell": "nan/any/hogwild", "verdict": "not the promised error", **GOOD},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- faults: begin -->\na former table\n<!-- faults: end -->\nafter\n")
    faults.write_into(page, faults.table(faults.read_results(results)))
    told = page.read_text()
    assert told.startswith("before\n")
    assert told.endswith("\nafter\n")
    assert "a former table" not in told
    assert "| kill-worker | start | not run | model | not run | not run |" in told
    assert "| kill-server | mid | not run | error, 3.0 s ° | not run | no server |" in told
    assert "| nan | any | not run | **does not hold** | not run | not run |" in told
    assert f"3 of {len(faults.all_cells())} cells were run; 2 of them hold" in told
