"""JSON lines, TensorBoard's files and the timeline, read by whoever reads such files."""

from __future__ import annotations

import io
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tracking_cases import RUN, Time, small_fit, small_search

from sparkdl.data.tfrecord.framing import read_frames
from sparkdl.errors import ResourceError
from sparkdl.progress.events import (
    EpochEnded,
    EpochProgressed,
    TrainingBegan,
    TrainingEnded,
    TrainingFailed,
    TrialEnded,
    TrialEpochEnded,
    as_json,
)
from sparkdl.tracking import JsonLines, TensorBoard, Timeline
from sparkdl.tracking.sinks import Thinning


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- JSON lines


def test_each_event_is_a_line_of_a_file_named_after_the_run(tmp_path: Path) -> None:
    sink = JsonLines(str(tmp_path / "runs"), clock=Time(step=1.0))
    for event in small_fit():
        sink.handle(event)
    found = lines_of(tmp_path / "runs")
    assert (tmp_path / "runs" / f"{RUN.run_id}.jsonl").exists()
    assert [{k: v for k, v in line.items() if k != "time"} for line in found] == [
        as_json(event) for event in small_fit()
    ]
    assert [line["time"] for line in found] == [1001.0 + n for n in range(len(found))]
    assert found[0]["run"]["parameters"]["rule"] == {"name": "mean"}
    assert found[3]["workers"][1]["usage"]["seconds"]["compute"] == 1.0


def test_the_lines_are_there_while_the_fit_runs(tmp_path: Path) -> None:
    sink = JsonLines(str(tmp_path))
    sink.handle(TrainingBegan(0, 1, RUN))
    assert len(lines_of(tmp_path)) == 1
    sink.handle(TrainingFailed("ValueError: x"))
    assert lines_of(tmp_path)[1]["error"] == "ValueError: x"


def test_a_day_of_progress_is_a_few_thousand_lines(tmp_path: Path) -> None:
    time = Time(step=5.0)
    sink = JsonLines(str(tmp_path), clock=time)
    sink.handle(TrainingBegan(0, 1, RUN))
    for batches in range(86_400 // 5):
        sink.handle(EpochProgressed(0, batches, 100_000, {"loss": 1.0}))
    sink.handle(TrainingEnded(1))
    assert 1_000 < len(lines_of(tmp_path)) < 4_000


def test_a_number_that_json_lacks_is_null(tmp_path: Path) -> None:
    sink = JsonLines(str(tmp_path))
    sink.handle(TrainingBegan(0, 1, RUN))
    sink.handle(EpochEnded(0, 1, 1, 1, {"loss": math.nan}))
    assert lines_of(tmp_path)[1]["metrics"] == {"loss": None}
    sink.handle(TrainingEnded(1))


def test_a_folder_that_cannot_be_made_is_an_error_at_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        JsonLines(str(tmp_path / "file" / "runs")).handle(TrainingBegan(0, 1, RUN))


def test_an_object_store_has_the_whole_file_after_each_epoch() -> None:
    fsspec = pytest.importorskip("fsspec")
    folder = "memory://sparkdl-tracking-test"
    sink = JsonLines(folder)
    memory = fsspec.filesystem("memory")
    path = f"/sparkdl-tracking-test/{RUN.run_id}.jsonl"
    try:
        for event in small_fit():
            sink.handle(event)
            if isinstance(event, EpochEnded):
                last = memory.cat(path).decode().splitlines()[-1]
                assert json.loads(last)["epoch"] == event.epoch
        assert json.loads(memory.cat(path).decode().splitlines()[-1])["event"] == "training_ended"
    finally:
        memory.rm("/sparkdl-tracking-test", recursive=True)


def test_records_are_kept_at_growing_distances() -> None:
    thinning = Thinning(0.5)
    kept = [now / 10 for now in range(100_000) if thinning.due(now / 10)]
    assert kept[:3] == [0.0, 0.5, 1.0]
    assert kept[-1] - kept[-2] == pytest.approx(20, abs=1)
    assert len(kept) < 2_500


# -- TensorBoard


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's own way to leave TensorFlow alone, whose import takes seconds."""
    name = "tensorboard.compat.notf"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    assert reader.file_version == 2.0
    return {
        tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def test_tensorboards_own_reader_finds_every_number(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path), clock=Time(step=0.6))
    for event in small_fit():
        sink.handle(event)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "train", "validation", "worker_0", "worker_1",
    ]  # fmt: skip
    trained = scalars(tmp_path / "train")
    assert trained == {
        "epoch_loss": [(0, 1.0), (1, 0.5)],
        "epoch_f1/0": [(0, 0.5), (1, 0.5)],
        "epoch_f1/1": [(0, 1.0), (1, 1.0)],
        "batch_loss": [(10, 1.5), (30, 1.0)],
        "batch_f1/0": [(10, 0.25), (30, 0.25)],
        "batch_f1/1": [(10, 0.75), (30, 0.75)],
        "rows_per_s": [(0, 50.0), (1, 50.0)],
        "staleness": [(0, 0.5), (1, 0.5)],
    }
    assert scalars(tmp_path / "validation") == {"epoch_loss": [(0, 1.25), (1, 0.75)]}
    worker = scalars(tmp_path / "worker_0")
    assert worker["worker_share/compute"][0] == (20, 0.75)  # 0.75 of 1.0 s since the look before
    assert worker["worker_share/exchange"][0] == (20, 0.25)
    assert worker["worker_memory_mb"][0][1] == pytest.approx(200 * 1.048576, abs=0.1)
    ratio = (
        worker["worker_rows_per_s"][0][1]
        / scalars(tmp_path / "worker_1")["worker_rows_per_s"][0][1]
    )
    assert ratio == pytest.approx(2.0, rel=1e-3)


def test_tensorboard_has_a_run_for_each_trial_of_a_search(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path))
    for event in small_search():
        sink.handle(event)
    sink.handle(TrialEpochEnded(3, 2, {"val_accuracy": 0.75}))  # it goes on
    sink.handle(TrialEnded(3, 3, "waiting", {"val_accuracy": 0.75}))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"trial_{n}" for n in range(11))
    found = scalars(tmp_path / "trial_3")
    assert found["epoch_val_accuracy"] == [
        (0, pytest.approx(0.59)), (1, pytest.approx(0.69)), (2, 0.75),
    ]  # fmt: skip
    assert found["epoch_loss"] == [(0, 1.0), (1, 1.0)]


def test_the_numbers_are_there_while_the_fit_runs(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path))
    sink.handle(TrainingBegan(0, 2, RUN))
    sink.handle(EpochProgressed(0, 10, 20, {"loss": 0.5}))
    assert scalars(tmp_path / "train") == {"batch_loss": [(10, 0.5)]}
    sink.handle(TrainingFailed("ValueError: x"))


def test_numbers_beyond_float32_and_not_finite_are_written(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path))
    sink.handle(TrainingBegan(0, 1, RUN))
    sink.handle(EpochEnded(0, 1, 1, 1, {"loss": 1e300, "a": math.nan, "b": -1e300}))
    sink.handle(TrainingEnded(1))
    found = scalars(tmp_path / "train")
    assert found["epoch_loss"] == [(0, math.inf)]
    assert found["epoch_b"] == [(0, -math.inf)]
    assert math.isnan(found["epoch_a"][0][1])


def test_two_fits_into_one_folder_do_not_mix(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path), clock=Time())
    for _ in range(2):
        for event in small_fit():
            sink.handle(event)
    files = sorted((tmp_path / "train").iterdir())
    assert len(files) == 2
    for file in files:
        frames = list(read_frames(io.BytesIO(file.read_bytes())))
        assert b"brain.Event:2" in frames[0]
        assert len(frames) == 5


# -- timeline


def test_the_timeline_has_every_phase_of_every_rank_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    sink = Timeline(str(path), clock=Time(step=0.5))
    for event in small_fit():
        sink.handle(event)
    trace = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert sorted(names.values()) == ["driver", "rank 0", "rank 1"]
    for rank in range(2):
        found = [e for e in trace if e["ph"] == "X" and e["pid"] == rank]
        assert [e["name"] for e in found] == ["START", "STEP"]
        assert [e["dur"] for e in found] == [1e6, 2e6]
        assert found[1]["ts"] == found[0]["ts"] + found[0]["dur"]
        assert found[0]["ts"] == rank * 1e6  # by the clock of its host
    driver = [e["name"] for e in trace if e["ph"] == "X" and names[e["pid"]] == "driver"]
    assert driver == ["EPOCH 1", "EPOCH 2", "FINISH"]


def test_a_timeline_that_cannot_be_written_is_an_error_at_the_beginning(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be written"):
        Timeline(str(tmp_path)).handle(TrainingBegan(0, 1, RUN))
