"""What is trained is what plain Keras trains on the same rows: named cases, and drawn ones."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from case import Case, build
from check import check, check_many
from generate import BY_DESIGN
from local_spark import LocalSession, LocalSparkModel, Workers
from own_parts import CUSTOM
from referee import as_keras, rows

from examples import EXAMPLES
from sparkdl.errors import ModelError, SparkDLError

pytestmark = pytest.mark.usefixtures("graphs_run_as_they_are_traced")
HERE = Path(__file__).parent
FEW, CASES, MANY = 30, 150, 2000
PROCESSES = 2
"""A process waits for its workers half of the time, and they for it."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, workers: Workers) -> None:
    why, case = EXAMPLES[name]
    found = check(case, workers)
    assert not found, f"{why}\n{case!r}\n{json.dumps(found, indent=1)}"


@pytest.mark.usefixtures("draws_of_the_seed_alone")
@pytest.mark.parametrize("seed", range(PROCESSES))
def test_drawn_cases(seed: int, workers: Workers) -> None:
    """In this process, whose workers have imported all that a case needs."""
    report = check_many(FEW // PROCESSES, workers, seed)
    assert not report.failures, report
    assert report.cases == FEW // PROCESSES, report


@pytest.mark.slow
def test_more_drawn_cases() -> None:
    check_in_processes(CASES, range(PROCESSES))


@pytest.mark.slow
def test_many_drawn_cases() -> None:
    check_in_processes(MANY, random.sample(range(2**32), PROCESSES))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("count", [4, pytest.param(250, marks=pytest.mark.slow)])
def test_drawn_cases_of_another_backend(backend: str, count: int) -> None:
    pytest.importorskip(backend)
    check_in_processes(count, [0 if count < 100 else random.randrange(2**32)], backend)


def check_in_processes(count: int, seeds: range | list[int], backend: str = "tensorflow") -> None:
    """Checks as many drawn cases, in a process for each seed."""
    environment = {**os.environ, "KERAS_BACKEND": backend}
    commands = [
        [sys.executable, str(HERE / "check.py"), str(count // len(seeds)), str(seed)]
        for seed in seeds
    ]
    started = [
        subprocess.Popen(
            c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for c in commands
    ]
    said = [process.communicate() for process in started]
    for command, process, (out, err) in zip(commands, started, said, strict=True):
        print(f"{' '.join(command[1:])}\n{out}")
        assert process.returncode == 0, f"{command}\n{out}\n{err[-3000:]}"


def test_a_difference_is_found(workers: Workers) -> None:
    """The comparison itself: what is another by design is another."""
    several = Case(blocks=("dense", "batch norm"), sizes=(13, 7))
    assert [name for name, meets in BY_DESIGN.items() if meets(several)]
    assert {*check(several, workers)} == {*several.modes}


def test_a_case_is_made_again_of_its_text() -> None:
    case = Case(inputs=("image", "vector"), optimizer="adam", sizes=(3, 0), shuffle=True)
    assert eval(repr(case)) == case


def fit(case: Case, model: keras.Model, workers: Workers, **arguments: object) -> None:
    spark_model = LocalSparkModel.of(LocalSession(workers, case.sizes, ()))(
        model, num_workers=len(case.sizes), custom_objects=CUSTOM, mode="synchronous",
        frequency="batch", batch_size=case.batch,
    )  # fmt: skip
    spark_model.fit(as_keras(case, *rows(case, sum(case.sizes))), verbose=0, **arguments)


def test_a_stateful_model_has_one_worker(workers: Workers) -> None:
    case = Case(inputs=("sequence",), blocks=("stateful",), sizes=(8, 8))
    jobs = workers.jobs
    with pytest.raises(ModelError, match="cannot be trained by several workers"):
        fit(case, build(case), workers)
    assert workers.jobs == jobs


def test_a_sum_that_no_loss_of_keras_tells_of_is_refused(workers: Workers) -> None:
    case = Case(form="own sum", sizes=(8, 8))
    with pytest.raises(SparkDLError, match="no mean over the rows"):
        fit(case, build(case), workers)
