"""What ``fit`` warns of after training."""

from __future__ import annotations

import warnings

import pytest

from sparkdl.spark.driver.fitting import warn_of_damping


def test_changes_of_many_workers_that_hardly_counted() -> None:
    with pytest.warns(RuntimeWarning, match=r"high for 8 workers.*19% of them counted"):
        warn_of_damping(0.19, 8)


@pytest.mark.parametrize(("counted", "workers"), [(0.51, 2), (0.81, 8), (1.0, 1)])
def test_changes_that_counted_or_of_two_workers(counted: float, workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_damping(counted, workers)
