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


EVERY = ("asynchronous", "hogwild", "synchronous", "allreduce")
SERVED = EVERY[:3]
KILLS = ("start", "exchange", "mid", "end")
WANTED = {
    "kill-worker": (KILLS, EVERY),
    "kill-executor": (KILLS, EVERY),
    "kill-server": (KILLS, SERVED),
    "kill-shard": (KILLS, SERVED),
    "stop-shard": (("mid",), SERVED),
    "kill-shard-tables": (("mid",), SERVED),
    "kill-worker-tables": (("exchange", "mid"), EVERY),
    "kill-driver": (KILLS, EVERY),
    "kill-jvm": (KILLS, EVERY),
    "stop-worker": (("mid",), EVERY),
    "stop-executor": (("mid",), EVERY),
    "stop-server": (("mid",), SERVED),
    "stop-driver": (("mid",), EVERY),
    "full-spill": (("any",), EVERY),
    "full-checkpoint": (("any",), EVERY),
    "interrupt": (("start", "mid", "end"), EVERY),
    "stopped-context": (("mid",), EVERY),
    "nan": (("any",), EVERY),
    "large-metrics": (("any",), EVERY),
    "truncated-checkpoints": (("any",), EVERY),
    "two-fits": (("any",), EVERY),
    "count-worker": (("amid",), EVERY),
    "count-executor": (("amid",), EVERY),
    "count-twice": (("amid",), EVERY),
    "count-both": (("amid",), EVERY),
    "count-checkpoint": (("checkpoint",), EVERY),
    "count-silent": (("amid",), EVERY),
    "count-third": (("amid",), EVERY),
    "kill-worker-defaults": (("mid",), EVERY),
    "kill-pair": (("mid",), SERVED),
    "kill-pair-shard": (("mid",), SERVED),
    "stop-worker-long": (("mid",), EVERY),
    "stop-server-long": (("mid",), SERVED),
    "stop-pair-long": (("mid",), EVERY),
    "memory-executor": (("any",), EVERY),
    "readonly-tmp": (("any",), EVERY),
    "clock-forward": (("mid",), EVERY),
    "clock-back": (("mid",), EVERY),
    "count-worker-shuffled": (("amid",), EVERY),
    "count-executor-shuffled": (("amid",), EVERY),
}
"""Fault -> when it comes, and in which modes: what the matrix must have at least."""


def loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{file.stem}_under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


@pytest.fixture(scope="module")
def faults() -> Any:
    return loaded(FILE)


def test_the_matrix(faults: Any) -> None:
    cells = [(cell.kind, cell.moment, cell.mode) for cell in faults.all_cells()]
    assert len(set(cells)) == len(cells)
    wanted = {
        (kind, moment, mode)
        for kind, (moments, modes) in WANTED.items()
        for moment in moments
        for mode in modes
    }
    assert len(wanted) == 230
    assert wanted - {*cells} == set()


def test_how_long_things_are_stopped_and_may_take(
    faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = FILE.parent / "support"
    monkeypatch.syspath_prepend(str(support))
    cell = loaded(support / "fault_cell.py")
    assert (cell.STOP_S, cell.LONG_STOP_S) == (20, 30)
    assert faults.ERROR_WITHIN_S == faults.GONE_WITHIN_S == 15


def test_the_page_has_the_rows_of_the_matrix(faults: Any) -> None:
    """Faults, moments, promises, and where there is no server; what was measured is its own."""

    def rows(text: str) -> list[tuple[str, ...]]:
        found = []
        for line in text.splitlines():
            if line.startswith("| ") and not line.startswith("| fault "):
                kind, moment, *results, promise = (c.strip() for c in line.strip("|").split("|"))
                found.append((kind, moment, promise, *(str(r == "no server") for r in results)))
        return found

    page = (FILE.parents[1] / "docs" / "reliability.md").read_text()
    table = page.partition("<!-- faults: begin -->")[2].partition("<!-- faults: end -->")[0]
    assert rows(table) == rows(faults.table({}))
    assert {row[0] for row in rows(table)} >= {*WANTED}


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
    counted = {"rows": 100, "rows_off": 0, "least": 8.0, "most": 8.0}
    exact = {**GOOD, "counts": counted}
    del exact["accuracy"]
    assert verdict("count-worker", "amid", **exact) == "held"
    exact["counts"] = counted | {"rows_off": 3, "least": 5.0}
    assert "3 of 100 rows" in verdict("count-worker", "amid", **exact)
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
