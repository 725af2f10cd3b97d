"""Phrases that take two readings: none of the loose ones, ever fewer fragments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("sparkdl", "docs", "examples", "benchmarks", "tests", "notebooks", "docker", "release")
LOOSE = {
    "of more those of": "say which are taken where there are more",
    "of more the": "say which are taken where there are more",
    "none that": "'no' and a noun",
    "what becomes of": "'what happens to', or 'how ... is joined'",
    "as for the others": "say what is the same",
    "so long": "a length: 'this many batches', 'seconds after which'",
}
"""A phrase, and what to write in its place."""

FRAGMENT = re.compile(r"^\s+[\w*]+(?: \([^)]*\))?: (?:Of|Those|That)\b", re.M)
"""An argument described by a fragment: ``seed: Of the order``; write ``Seed of the order``."""


def texts() -> dict[str, str]:
    """All that people read; decisions are records, and this file has the phrases."""
    paths = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        paths += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".ipynb")]
    left_out = (ROOT / "docs" / "adr", Path(__file__), ROOT / "tests/unit/test_house.py")
    return {
        str(path.relative_to(ROOT)): " ".join(path.read_text().split())
        for path in paths
        if not any(path.is_relative_to(one) for one in left_out)
    }


@pytest.mark.parametrize("phrase", LOOSE)
def test_no_loose_phrase(phrase: str) -> None:
    pattern = re.compile(rf"\b{phrase}\b", re.IGNORECASE)
    found = [name for name, text in texts().items() if pattern.search(text)]
    assert found == [], f"instead of {phrase!r}: {LOOSE[phrase]}"


def test_arguments_are_described_by_nouns() -> None:
    """Wanted: 0. The number only falls."""
    found = {
        str(path.relative_to(ROOT)): len(FRAGMENT.findall(path.read_text()))
        for path in (ROOT / "sparkdl").rglob("*.py")
    }
    assert sum(found.values()) <= 42, {name: count for name, count in found.items() if count}
