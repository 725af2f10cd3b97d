"""Predictions on a GPU that several tasks share: each task has a model of its own there."""

from __future__ import annotations

import warnings

import pytest

from sparkdl.spark.inference.predict import _warn_of_shared_gpus


@pytest.mark.parametrize("amount", ["", "1", "2", "0", "none"])
def test_a_gpu_for_each_task(amount: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_shared_gpus(amount)


def test_a_shared_gpu() -> None:
    with pytest.warns(RuntimeWarning, match=r"4 workers share each GPU.*amount=0\.25"):
        _warn_of_shared_gpus("0.25")
