"""Benchmarks: few, each behind a number that a page shows; pages name scripts that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/guide").glob("*.md")),
]
SCRIPTS = {path.name for path in BENCHMARKS.glob("*.py")}
SHARED = {"run.py", "workload.py"}
"""Scripts without a table of their own: one runs all, one has what they train on."""


def named(text: str) -> set[str]:
    """Scripts that a text names by their path."""
    return set(re.findall(r"benchmarks/((?:support/)?\w+\.py)", text))


def test_there_are_at_most_30() -> None:
    assert len(SCRIPTS) <= 30


def test_a_page_shows_what_each_printed() -> None:
    shown = named("\n".join(path.read_text() for path in PAGES))
    assert SCRIPTS - SHARED - shown == set()


def test_the_scripts_that_are_named_exist() -> None:
    """Decisions are records: they may name what has gone since."""
    texts = [path.read_text() for path in [*PAGES, *(ROOT / "sparkdl").rglob("*.py")]]
    assert {name for name in named("\n".join(texts)) if not (BENCHMARKS / name).exists()} == set()


def test_make_bench_runs_what_exists() -> None:
    told = set(re.findall(r'\("(\w+\.py)"', (BENCHMARKS / "run.py").read_text()))
    assert told - SCRIPTS == set()
    slow = {"faults.py", "peers.py", "torch_peers.py"}  # hours, or environments of their own
    assert SCRIPTS - SHARED - slow - told == set()


def test_the_page_of_benchmarks_is_read_in_one_go() -> None:
    assert len((ROOT / "docs/benchmarks.md").read_text().splitlines()) <= 700
