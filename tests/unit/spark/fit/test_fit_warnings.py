"""What ``fit`` warns of before and after training."""

from __future__ import annotations

import warnings

import pytest

from sparkdl.spark.fit.fit_warnings import (
    described,
    warn_of_damping,
    warn_of_mixed_validation,
    warn_of_no_learning,
    warn_of_server_load,
)
from sparkdl.training.phases import Usage

pytestmark = pytest.mark.keras


def test_validation_of_workers_that_take_turns() -> None:
    with pytest.warns(RuntimeWarning, match=r"8 workers take turns on 2 task slots.*num_workers=2"):
        warn_of_mixed_validation(8, 2)


@pytest.mark.parametrize(("workers", "at_once"), [(8, 8), (2, 4), (8, 0), (1, 1)])
def test_validation_of_workers_that_run_together(workers: int, at_once: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_mixed_validation(workers, at_once)


def test_changes_of_many_workers_that_hardly_counted() -> None:
    with pytest.warns(RuntimeWarning, match=r"high for 8 workers.*19% of them counted"):
        warn_of_damping(0.19, 8, 5000, 0.0, "")


def test_few_steps_of_many_workers() -> None:
    with pytest.warns(RuntimeWarning, match=r"352 steps of each of 8 workers.*1\.1 to 4\.3 times"):
        warn_of_damping(0.88, 8, 352, 0.0, "")


def test_inputs_that_are_not_centered() -> None:
    assert described("x", ["age"]) == "input 'x' (column 'age')"
    furthest = described("table", list("abcdefg"))
    match = (
        r"input 'table' \(columns 'a', 'b', 'c', 'd', 'e', \.\.\.\) is not centered .*"
        "mean makes up 75% .* 65% of the changes of 2 workers"
    )
    with pytest.warns(RuntimeWarning, match=match):
        warn_of_damping(0.65, 2, 1408, 0.75, furthest)


@pytest.mark.parametrize(
    ("counted", "workers", "steps", "off_center"),
    [
        (0.51, 2, 300, 0.0),
        (0.51, 2, 300, 0.45),
        (0.9, 2, 300, 0.75),
        (0.81, 8, 5000, 0.0),
        (1.0, 1, 300, 0.75),
    ],
    ids=["two with Adam", "MNIST and a9a", "a low rate", "many steps", "one worker"],
)
def test_changes_that_learn_as_one_process(
    counted: float, workers: int, steps: int, off_center: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_damping(counted, workers, steps, off_center, "")


def usage(workers: int, compute_s: float, exchange_s: float) -> dict[int, Usage]:
    """Workers that each used their time in the same way."""
    seconds = {"start": 5.0, "compute": compute_s, "exchange": exchange_s, "wait": 9.0}
    return {rank: Usage(seconds) for rank in range(workers)}  # type: ignore[arg-type]


def test_many_workers_that_wait_for_the_one_server() -> None:
    with pytest.warns(RuntimeWarning, match=r"8 workers at .* for 75% .*frequency=8 asks"):
        warn_of_server_load(usage(8, 1.0, 3.0), 2, 8)


@pytest.mark.parametrize(
    ("workers", "exchange_s", "window"),
    [(7, 3.0, 1), (64, 0.9, 1), (8, 3.0, -1), (0, 0.0, 1)],
    ids=["few workers", "little exchanged", "once an epoch", "nobody"],
)
def test_a_server_that_is_not_loaded(workers: int, exchange_s: float, window: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_server_load(usage(workers, 1.0, exchange_s), window, workers)


def test_partitions_that_take_turns_are_no_load() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_server_load(usage(100, 1.0, 3.0), 1, 2)


def test_a_model_that_answers_without_its_inputs() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"after 3 epochs its loss is 2\.302, .* has 2\.303; 8 "
    ):
        assert warn_of_no_learning((2.33, 2.304, 2.302), 2.3026, 8)


@pytest.mark.parametrize(
    ("losses", "guessing", "workers"),
    [
        ((2.3, 2.2), 2.3, 8),
        ((2.3,), 2.3, 8),
        ((2.3, 2.3), None, 8),
        ((2.3, 2.3), 2.3, 1),
        ((), 1, 2),
    ],
    ids=["learned a little", "one epoch", "not known", "one worker", "no loss"],
)
def test_a_model_that_learns_or_of_which_nothing_is_known(
    losses: tuple[float, ...], guessing: float | None, workers: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_of_no_learning(losses, guessing, workers)
