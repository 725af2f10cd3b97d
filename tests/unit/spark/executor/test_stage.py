"""An error of a task in few lines: what failed, where, and the user's own frames."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.errors import DataError
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.task import RankContext
from sparkdl.process import payload
from sparkdl.spark.executor.stage import run_task
from sparkdl.spark.inference.forward import ForwardTask


def of_the_user(value: int) -> int:
    raise ValueError(f"no picture: {value}")


@dataclass(frozen=True)
class Failing(ForwardTask):
    """A task whose rows do not fit, far below where Spark calls it."""

    with_cause: bool

    @property
    def devices(self) -> DeviceRequest:
        return DeviceRequest("tensorflow", False)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from self.deeper(batches, 20)

    def deeper(self, batches: Any, depth: int) -> Iterator[pa.RecordBatch]:
        if depth:
            yield from self.deeper(batches, depth - 1)
        cause: Exception | None = None
        if self.with_cause:
            try:
                of_the_user(3)
            except ValueError as error:
                cause = error
        raise DataError("row 3 of 'x'", expected="a picture", received="none") from cause


@pytest.mark.parametrize("with_cause", [False, True])
def test_an_error_comes_without_the_frames_between(with_cause: bool) -> None:
    content = payload.dump(Failing(with_cause))
    with pytest.raises(DataError, match="row 3 of 'x'") as caught:
        list(run_task(iter([]), content))
    error = caught.value
    shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    assert "in run_rank" not in shown  # of sparkdl; those of a user's code stay
    assert shown.count("in run_task") == 1
    assert "in deeper" in shown
    assert ("in of_the_user" in shown) == with_cause
