"""A session of any length gives what plain Keras gives: named sessions, and drawn ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import randrange

import pytest
from local_spark import Workers
from session import call
from session_check import check, check_many
from session_examples import BUILD, EXAMPLES, FIT

pytestmark = pytest.mark.usefixtures("graphs_run_as_they_are_traced")
SCRIPT = Path(__file__).parent / "session_check.py"
FEW, MANY = 40, 1000
STEPS, MORE_STEPS = 5, 8


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, workers: Workers) -> None:
    why, calls = EXAMPLES[name]
    found = check(calls, workers)
    assert not found, "\n".join([why, *map(repr, calls), *found])


@pytest.mark.usefixtures("draws_of_the_seed_alone")
def test_drawn_sessions(workers: Workers) -> None:
    """In this process, whose workers have imported all that a session needs."""
    report = check_many(FEW, workers, 0, steps=STEPS)
    assert not report.failures, report
    assert report.sessions >= FEW, report


@pytest.mark.slow
def test_many_drawn_sessions() -> None:
    check_in_process(MANY, randrange(2**32), MORE_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_many_drawn_sessions_of_another_backend(backend: str) -> None:
    pytest.importorskip(backend)
    check_in_process(MANY // 4, randrange(2**32), MORE_STEPS, backend)


def check_in_process(count: int, seed: int, steps: int, backend: str = "tensorflow") -> None:
    """Checks as many drawn sessions, in a process of their own."""
    command = [sys.executable, str(SCRIPT), str(count), str(seed), str(steps)]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-3000:]}"


def test_a_difference_is_found(workers: Workers) -> None:
    """The comparison itself: one side alone is changed."""
    from session import Place, Session

    session = Session(Place(workers))
    try:
        assert not session.do(call("build", **BUILD))
        session.model.optimizer.learning_rate = 0.5
        assert any("optimizer" in line for line in session.do(FIT))
    finally:
        session.close()
