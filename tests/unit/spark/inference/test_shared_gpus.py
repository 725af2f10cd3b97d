"""Predictions on a GPU that several tasks share: each task has a model of its own there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from sparkdl.spark.inference.forward import warn_of_shared_gpus


class Session:
    """A session of classic Spark or of Connect, as far as it is asked for a setting."""

    def __init__(self, amount: str) -> None:
        self.conf: Any = {"spark.task.resource.gpu.amount": amount} if amount else {}


@pytest.mark.parametrize("amount", ["", "1", "2", "0", "none"])
def test_a_gpu_for_each_task(amount: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_shared_gpus(Session(amount), "auto")
        warn_of_shared_gpus(Session("0.25"), False)
        warn_of_shared_gpus(None, "auto")


def test_a_shared_gpu() -> None:
    with pytest.warns(RuntimeWarning, match=r"4 workers share each GPU.*amount=0\.25") as told:
        warn_of_shared_gpus(Session("0.25"), "auto")
    assert told[0].filename == __file__
