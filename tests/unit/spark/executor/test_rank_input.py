"""What a rank does whose rows stop coming, because Spark lost an executor that held them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.errors import DataError, TransportError
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.task import RankContext
from sparkdl.process import payload
from sparkdl.spark.executor.stage import stage_function
from sparkdl.spark.executor.trainer import TrainTask

LOST = "Tried reading schema message, was null or length 0"


@dataclass(frozen=True)
class _Reads:
    """Reads its input, as ``fit`` does, and fails as ``fit`` does."""

    strategy: Any = None  # an error that is told to other ranks would need one

    @property
    def devices(self) -> DeviceRequest:
        return DeviceRequest(None)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                raise DataError("an error of the rank's own")
        yield from ()

    failed = TrainTask.failed


def _batches(*rows: int, error: Exception | None = None) -> Iterator[pa.RecordBatch]:
    for count in rows:
        yield pa.RecordBatch.from_pydict({"x": list(range(count))}, pa.schema({"x": pa.int64()}))
    if error is not None:
        raise error


def run(batches: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return list(stage_function(payload.dump(_Reads()), 1)(batches))


@pytest.mark.parametrize("rows", [(), (3, 2)])
def test_rows_that_stop_coming_are_sparks_to_send_again(rows: tuple[int, ...]) -> None:
    """Before, the other ranks were told of an ArrowInvalid, and the fit ended."""
    with pytest.raises(TransportError, match="Spark stopped sending") as caught:
        run(_batches(*rows, error=pa.ArrowInvalid(LOST)))
    assert LOST in str(caught.value)


def test_a_rank_that_fails_by_itself_is_no_matter_of_the_rows() -> None:
    with pytest.raises(AttributeError, match="report_failure"):  # the others are told
        run(_batches(0, 3))
    assert run(_batches(3, 2)) == []
