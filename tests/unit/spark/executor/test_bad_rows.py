"""Data that do not fit cost neither the framework's import nor the Python worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.config import LoopSettings
from sparkdl.data import ColumnSpec, DataSpec, decode
from sparkdl.errors import DataError
from sparkdl.failures import Failure
from sparkdl.launch.devices import DeviceRequest, Placement
from sparkdl.launch.task import RankContext, failed, failures_of, join_batches
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.process import payload
from sparkdl.spark.executor import stage, trainer
from sparkdl.spark.forms import shared_rows
from sparkdl.spark.forms.rdds import PairEncoder
from sparkdl.spark.inference import evaluate

SPEC = DataSpec({"x": ColumnSpec(("features",), (2,))}, {"y": ColumnSpec(("label",), ())})


def batch(*rows: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(rows, pa.list_(pa.float32())), pa.array([0.0] * len(rows))], names=["c0", "c1"]
    )


class FrameworkStarted(Exception):
    pass


@pytest.mark.parametrize("bad", [[1.0], [1.0, None], None])
def test_wrong_rows_are_found_before_the_framework_starts(
    monkeypatch: pytest.MonkeyPatch, bad: Any
) -> None:
    def start(placement: Placement) -> None:
        raise FrameworkStarted

    monkeypatch.setattr(trainer, "start_framework", start)
    spec = DataSpec(SPEC.features, {"y": ColumnSpec(("label",), (), kind="scalars")})
    task = trainer.TrainTask(
        ModelArchive(b"", b"", "tensorflow", ""),
        spec,
        LoopSettings(1, 4),
        None,
        1,  # type: ignore
    )
    with pytest.raises(DataError, match="'features'"):
        list(task.run(RankContext(0), iter([batch([1.0, 2.0], bad), batch([1.0, 2.0])])))
    with pytest.raises(FrameworkStarted):
        list(task.run(RankContext(0), iter([batch([1.0, 2.0])])))


@pytest.mark.parametrize("bad", [[1.0], [1.0, None], None])
def test_evaluate_finds_wrong_rows_before_the_framework_starts(
    monkeypatch: pytest.MonkeyPatch, bad: Any
) -> None:
    def start(placement: Placement) -> None:
        raise FrameworkStarted

    monkeypatch.setattr(evaluate, "start_framework", start)
    spec = DataSpec(SPEC.features, {"y": ColumnSpec(("label",), (), kind="scalars")})
    task = evaluate.EvaluateTask(ModelArchive(b"", b"", "tensorflow", ""), spec, 4, False)
    with pytest.raises(DataError, match="'features'"):
        list(task.run(RankContext(0), iter([batch([1.0, 2.0], bad), batch([1.0, 2.0])])))
    with pytest.raises(FrameworkStarted):
        list(task.run(RankContext(0), iter([batch([1.0, 2.0])])))
    assert list(task.run(RankContext(0), iter([]))) == []


def test_an_rdd_is_read_to_its_end_behind_a_row_that_does_not_fit() -> None:
    """Else Spark ends the Python worker, which may be one that has the framework."""
    pairs = PairEncoder(
        {"x": ColumnSpec(("x",), (2,), "float32", "binary")},
        {"y": ColumnSpec(("label",), (1,), "float32", "binary")},
    )
    rows = iter([([1.0, 2.0], 0.0), ([1.0], 0.0), *[([1.0, 2.0], 0.0)] * 5])
    encoded = list(pairs(rows))
    assert len(encoded) == 2
    assert "shape (2,)" in str(encoded[1][-1])
    assert next(rows, "the end") == "the end"


def test_the_framework_does_not_wait_long_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    in_time: list[bool] = []

    def start(placement: Placement) -> None:
        started.set()

    def late() -> Iterator[pa.RecordBatch]:
        in_time.append(started.wait(30.0))
        yield batch([1.0])

    monkeypatch.setattr(trainer, "start_framework", start)
    monkeypatch.setattr(trainer, "_FIRST_ROWS_S", 0.05)
    monkeypatch.setattr(trainer.TrainTask, "_train", lambda self, reader, *_: reader.result())
    task = trainer.TrainTask(
        ModelArchive(b"", b"", "tensorflow", ""),
        SPEC,
        LoopSettings(1, 4),
        None,
        1,  # type: ignore
    )
    with pytest.raises(DataError):
        list(task.run(RankContext(0), late()))
    assert in_time == [True]


@dataclass(frozen=True)
class DecodeTask:
    """Decodes its rows, and returns what it finds wrong."""

    devices = DeviceRequest(None)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spec = DataSpec({"x": ColumnSpec(("c0",), (2,))})
        for record in batches:
            decode(record, spec)
        yield from ()

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        yield from failed(rank.rank, Failure.of(rank.rank, error)).batches()


@pytest.mark.parametrize(("read_on_s", "read"), [(5.0, 6), (-1.0, 2)])
def test_a_task_that_fails_reads_its_input_to_the_end(
    monkeypatch: pytest.MonkeyPatch, read_on_s: float, read: int
) -> None:
    """Else Spark ends the Python worker, and the next fit imports the framework again."""
    monkeypatch.setattr(shared_rows, "_READ_ON_S", read_on_s)
    taken = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(6):
            taken.append(number)
            yield batch([1.0])

    out = list(stage.run_task(batches(), payload.dump(DecodeTask())))
    assert taken == list(range(read))
    (failure,) = failures_of(join_batches(out))
    assert failure.library_error().__class__ is DataError
