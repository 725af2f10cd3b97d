"""What is trained is what plain Keras trains on the same rows: named cases, and drawn ones."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from case import Case
from check import check, check_many
from generate import BY_DESIGN
from local_spark import Workers

from examples import EXAMPLES

HERE = Path(__file__).parent
CASES = 60
"""Each in two modes, or in three with one worker: 150 runs."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, workers: Workers) -> None:
    why, case = EXAMPLES[name]
    found = check(case, workers)
    assert not found, f"{why}\n{case!r}\n{json.dumps(found, indent=1)}"


@pytest.mark.slow
def test_drawn_cases(workers: Workers) -> None:
    report = check_many(CASES, workers)
    print(report)
    assert not report.failures, str(report)


@pytest.mark.slow
def test_many_drawn_cases(workers: Workers) -> None:
    number = random.randrange(2**32)
    print(f"seed {number}")
    report = check_many(800, workers, number)
    print(report)
    assert not report.failures, f"seed {number}\n{report}"


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 200])
def test_drawn_cases_of_another_backend(backend: str, count: int) -> None:
    pytest.importorskip(backend)
    arguments = [str(count)] if count < 100 else [str(count), str(random.randrange(2**32))]
    command = [sys.executable, str(HERE / "check.py"), *arguments]
    ended = subprocess.run(
        command, env={**os.environ, "KERAS_BACKEND": backend}, capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{arguments}\n{ended.stdout}\n{ended.stderr[-3000:]}"


def test_a_difference_is_found(workers: Workers) -> None:
    """The comparison itself: what is another by design is another."""
    several = Case(blocks=("dense", "batch norm"), sizes=(13, 7))
    assert [name for name, meets in BY_DESIGN.items() if meets(several)]
    assert {*check(several, workers)} == {*several.modes}


def test_a_case_is_made_again_of_its_text() -> None:
    case = Case(inputs=("image", "vector"), optimizer="adam", sizes=(3, 0), shuffle=True)
    assert eval(repr(case)) == case
