"""FitMonitor: events in order, commands, and speeds that are true."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from progress_cases import Clock, Recorder, epoch, make_monitor, mean, report

from sparkdl.errors import DataError
from sparkdl.progress.events import (
    EpochBegan,
    EpochEnded,
    EpochProgressed,
    Event,
    LinesLogged,
    TrainingFailed,
    WorkersAwaited,
    WorkersJoined,
    WorkersProgressed,
    WorkerTraced,
    WorkerView,
    as_json,
)
from sparkdl.progress.monitor import Command, FitMonitor
from sparkdl.training.phases import Spans


def test_events_come_in_order() -> None:
    sink = Recorder()
    monitor = make_monitor(sink, epochs=2)
    monitor.begin()
    monitor.begin()
    assert monitor.update(report(joined=0)) is None
    assert monitor.update(report(joined=2)) is None
    assert monitor.update(report(joined=2)) is None
    assert monitor.update(report(epoch(400, missing=2))) is None
    assert monitor.update(report(epoch(400, missing=2))) is None  # nothing new: no event
    assert monitor.update(report(epoch(1000), epoch(100, missing=1))) == Command(release=0)
    assert monitor.update(report(epoch(1000), epoch(1000, loss=0.5))) == Command(release=1)
    monitor.end()
    assert sink.names == [
        "TrainingBegan", "EpochBegan", "WorkersJoined", "EpochProgressed", "EpochEnded",
        "EpochBegan", "EpochProgressed", "EpochEnded", "TrainingEnded",
    ]  # fmt: skip
    assert sink.of(WorkersJoined) == [WorkersJoined(0, 2)]
    assert [(e.epoch, e.metrics) for e in sink.of(EpochEnded)] == [
        (0, {"loss": 1.0}), (1, {"loss": 0.5}),
    ]  # fmt: skip
    assert [(e.epoch, e.batches) for e in sink.of(EpochProgressed)] == [(0, 40), (1, 10)]
    assert monitor.losses == (1.0, 0.5)
    assert (monitor.epochs_done, monitor.stopped) == (2, False)


def test_lost_workers_are_told_once_and_that_they_are_back() -> None:
    sink = Recorder()
    monitor = make_monitor(sink)
    monitor.begin()
    for awaited in ((), (1,), (1,), (0, 1), ()):
        monitor.update(replace(report(epoch(400, missing=2)), awaited=awaited))
    told = [event.ranks for event in sink.of(WorkersAwaited)]
    assert told == [(1,), (0, 1), ()]


def test_an_epoch_that_a_lost_stage_has_not_reported_whole_ends_and_the_next_one_goes_on() -> None:
    sink = Recorder()
    monitor = make_monitor(sink, epochs=3)
    monitor.begin()
    lost = report(epoch(400, loss=2.0, missing=1))
    assert monitor.update(lost) is None
    monitor.end_epochs(lost, 2)  # of the second epoch nothing was reported at all
    assert monitor.epochs_done == 2
    restarted = replace(report(), epochs={2: epoch(1000, loss=0.5)})
    assert monitor.update(restarted) == Command(release=2)
    losses = [e.metrics["loss"] for e in sink.of(EpochEnded)]
    np.testing.assert_equal(losses, [2.0, np.nan, 0.5])  # 0 would be the best of all


@pytest.mark.parametrize(
    ("validates", "known", "names"),
    [("must", False, True), ("may", False, False), ("may", True, True), (None, False, False)],
)
def test_an_epoch_whose_validation_was_lost_has_its_place(
    validates: Literal["must", "may"] | None, known: bool, names: bool
) -> None:
    """Lists of a History of which one were shorter would belong to other epochs."""
    sink = Recorder()
    monitor = FitMonitor(sink, [], mean, epochs=3, first_epoch=0, validates=validates)
    monitor.begin()
    whole = replace(epoch(1000), val_metrics=np.array([30.0, 10.0]))
    if known:
        monitor.update(report(whole))
    before = [whole] * known
    monitor.end_epochs(report(*before, epoch(500, missing=1)), 1 + known)
    found = sink.of(EpochEnded)[-1].metrics
    assert found["loss"] == 1.0
    assert ("val_loss" in found) == names
    if names:
        np.testing.assert_equal(found["val_loss"], np.nan)


def test_metrics_are_not_computed_for_nobody() -> None:
    sink = Recorder(wants_progress=False)
    monitor = make_monitor(sink)
    monitor.begin()
    monitor.update(report(epoch(400, missing=2)))
    monitor.update(report(epoch(1000)))
    assert not sink.of(EpochProgressed)
    assert len(sink.of(EpochEnded)) == 1


def test_an_epoch_of_which_every_row_was_refused_has_no_metrics() -> None:
    sink = Recorder()
    monitor = make_monitor(sink)
    monitor.begin()
    monitor.update(report(replace(epoch(1000), metrics=np.zeros(2))))
    loss = sink.of(EpochEnded)[0].metrics["loss"]
    assert isinstance(loss, float)
    assert np.isnan(loss)


def test_rows_to_validate_on_that_are_not_there() -> None:
    sink = Recorder()
    monitor = FitMonitor(sink, [], mean, epochs=3, first_epoch=0, validates="must")
    monitor.begin()
    monitor.end_epochs(report(epoch(500, missing=1)), 1)  # of a lost stage: nobody can know
    assert len(sink.of(EpochEnded)) == 1
    with pytest.raises(DataError, match="no rows to validate on"):
        monitor.update(report(epoch(1000), epoch(1000)))
    for validates, hint in (("must", r"validation_data\.count\(\)"), ("split", "a larger valid")):
        other = FitMonitor(sink, [], mean, epochs=3, first_epoch=0, validates=validates)
        other.begin()
        with pytest.raises(DataError, match=hint):
            other.update(report(epoch(1000), epoch(1000)))
    by_column = FitMonitor(sink, [], mean, epochs=3, first_epoch=0, validates="may")
    by_column.begin()
    with pytest.warns(RuntimeWarning, match="no row was chosen to validate on"):
        by_column.update(report(epoch(1000), epoch(1000)))


def test_validation_metrics_are_told_apart() -> None:
    sink = Recorder()
    monitor = make_monitor(sink)
    monitor.begin()
    held_out = replace(epoch(1000), val_metrics=np.array([30.0, 10.0]))
    monitor.update(report(held_out))
    assert sink.of(EpochEnded)[0].metrics == {"loss": 1.0, "val_loss": 3.0}


@pytest.mark.parametrize("waits", [False, True])
def test_weights_are_loaded_before_callbacks_see_the_end_of_an_epoch(waits: bool) -> None:
    """Without callbacks, too, where the workers wait for it: before they are released."""
    order: list[str] = []
    sink = Recorder(has_callbacks=not waits, on_event=lambda _, e: order.append(type(e).__name__))
    monitor = make_monitor(sink)
    monitor.watch(lambda: order.append("weights"), waits=waits)
    monitor.begin()
    monitor.update(report(epoch(1000)))
    assert order[-3:] == ["weights", "EpochEnded", "EpochBegan"]


def test_a_stop_at_the_end_of_an_epoch() -> None:
    def stop(recorder: Recorder, event: Event) -> None:
        recorder.stop_wanted = isinstance(event, EpochEnded)

    sink = Recorder(on_event=stop)
    monitor = make_monitor(sink)
    monitor.begin()
    assert monitor.update(report(epoch(1000), epoch(1000))) == Command(stop=True, release=0)
    assert len(sink.of(EpochEnded)) == 1
    assert (monitor.epochs_done, monitor.stopped, monitor.stopped_inside) == (1, True, False)
    assert monitor.update(report(epoch(1000), epoch(1000))) is None


def test_a_stop_in_the_middle_of_an_epoch() -> None:
    def stop(recorder: Recorder, event: Event) -> None:
        recorder.stop_wanted = recorder.stop_wanted or isinstance(event, EpochProgressed)

    sink = Recorder(has_callbacks=True, on_event=stop)
    monitor = make_monitor(sink)
    loaded: list[int] = []
    monitor.watch(lambda: loaded.append(1))
    monitor.begin()
    assert monitor.update(report(epoch(300, missing=1))) == Command(stop=True, release=0)
    ended = sink.of(EpochEnded)
    assert [(e.epoch, e.batches, e.rows) for e in ended] == [(0, 30, 300)]
    assert (monitor.epochs_done, monitor.stopped, monitor.stopped_inside) == (0, True, True)
    assert not loaded
    assert len(sink.of(EpochBegan)) == 1


def test_a_rate_that_changes_is_told_once() -> None:
    def halve(recorder: Recorder, event: Event) -> None:
        if isinstance(event, EpochBegan):
            recorder.learning_rate = 0.1 / 2**event.epoch

    sink = Recorder(on_event=halve)
    monitor = make_monitor(sink)
    monitor.begin()
    assert monitor.update(report(epoch(100, missing=1))) is None
    assert monitor.update(report(epoch(1000))) == Command(learning_rate=0.05, release=0)
    assert monitor.update(report(epoch(1000))) is None
    sink.learning_rate = 0.01  # between two events: a thread of the user's, for example
    assert monitor.update(report(epoch(1000))) == Command(learning_rate=0.01)


def test_a_rate_set_before_the_first_epoch_is_told_at_the_first_look() -> None:
    def scheduler(recorder: Recorder, event: Event) -> None:
        if isinstance(event, EpochBegan):
            recorder.learning_rate = 0.7

    monitor = make_monitor(Recorder(on_event=scheduler))
    monitor.begin()
    assert monitor.update(report(joined=0)) == Command(learning_rate=0.7)


def test_a_failure_is_told_if_the_training_had_begun() -> None:
    sink = Recorder()
    monitor = make_monitor(sink)
    monitor.fail(ValueError("before"))
    assert not sink.events
    monitor.begin()
    monitor.fail(ValueError("first line\nsecond line"))
    monitor.fail(KeyboardInterrupt())
    assert sink.events[-2:] == [
        TrainingFailed("ValueError: first line"), TrainingFailed("KeyboardInterrupt"),
    ]  # fmt: skip


# -- speeds (before: 0, 1 or 4 rows/s, or those of another epoch) -------------------------------


def speeds(sink: Recorder) -> list[float | None]:
    return [e.rows_per_s for e in sink.of(EpochEnded)]


def test_rows_per_second_of_an_epoch_are_its_rows_over_its_time() -> None:
    clock, sink = Clock(), Recorder()
    monitor = make_monitor(sink, clock)
    monitor.begin()
    clock.now += 20  # Spark starts workers
    monitor.update(report(joined=2))
    clock.now += 10  # the model is compiled
    monitor.update(report(epoch(100, missing=2)))
    clock.now += 3
    monitor.update(report(epoch(1000)))
    clock.now += 5
    monitor.update(report(epoch(1000), epoch(500, missing=2)))
    clock.now += 5
    monitor.update(report(epoch(1000), epoch(1000)))
    clock.now += 100
    monitor.update(report(epoch(1000), epoch(1000), epoch(1000)))
    assert speeds(sink) == [300.0, 100.0, 10.0]


def test_epochs_that_end_between_two_looks_share_the_time_between() -> None:
    clock, sink = Clock(), Recorder()
    monitor = make_monitor(sink, clock)
    monitor.begin()
    monitor.update(report(joined=2))
    clock.now += 0.5
    monitor.update(report(epoch(1000), epoch(1000)))
    clock.now += 0.5
    monitor.update(report(epoch(1000), epoch(1000), epoch(1000)))
    assert speeds(sink) == [4000.0, 4000.0, 2000.0]


def test_an_epoch_that_was_nearly_over_at_the_first_look_counts_as_a_whole() -> None:
    clock, sink = Clock(), Recorder()
    monitor = make_monitor(sink, clock)
    monitor.begin()
    monitor.update(report(joined=2))
    clock.now += 1
    monitor.update(report(epoch(990, missing=1)))
    clock.now += 1
    monitor.update(report(epoch(1000)))
    assert speeds(sink) == [500.0]


def test_what_nobody_saw_begin_has_no_speed_unless_workers_tell_the_time() -> None:
    clock, sink = Clock(), Recorder()
    monitor = make_monitor(sink, clock)
    monitor.begin()
    clock.now += 60
    monitor.update(report(joined=0))
    clock.now += 0.1
    monitor.update(report(epoch(1000), joined=0))
    assert speeds(sink) == [None]
    clock.now += 0.1
    monitor.update(report(epoch(1000), epoch(1000, seconds=2.0), joined=0))
    assert speeds(sink) == [None, 500.0]


def test_live_speed_is_of_the_last_seconds_and_survives_a_new_start() -> None:
    clock, sink = Clock(), Recorder()
    monitor = make_monitor(sink, clock, epochs=9)
    monitor.begin()
    monitor.update(report(joined=2))
    clock.now += 30
    for rows in (100, 200, 300, 500, 700, 900):
        clock.now += 1
        monitor.update(report(epoch(rows, missing=2)))
    shown = [e.rows_per_s for e in sink.of(EpochProgressed)]
    assert shown[:4] == [None, 100.0, 100.0, pytest.approx(400 / 3)]
    assert shown[-1] == 200.0
    clock.now += 1
    monitor.update(report(epoch(50, missing=2)))  # workers were lost; the stage began again
    clock.now += 1
    monitor.update(report(epoch(950, missing=2)))
    assert sink.of(EpochProgressed)[-1].rows_per_s == 900.0


def test_events_are_json() -> None:
    sink = Recorder()
    monitor = make_monitor(sink)
    monitor.begin()
    monitor.update(report(joined=2))
    monitor.update(report(epoch(400, missing=2)))
    monitor.update(report(epoch(1000, loss=float("nan"))))
    monitor.end()
    monitor.fail(KeyboardInterrupt())
    lines = [json.loads(json.dumps(as_json(e), allow_nan=False)) for e in sink.events]
    assert [line["event"] for line in lines[:3]] == [
        "training_began", "epoch_began", "workers_joined",
    ]  # fmt: skip
    assert lines[4]["metrics"] == {"loss": None}
    each = EpochEnded(0, 1, 1, metrics={"f1": [0.5, [0.25, float("inf")]]})
    assert as_json(each)["metrics"] == {"f1": [0.5, [0.25, None]]}


def test_workers_are_told_of_at_most_twice_a_second_and_once_at_the_end() -> None:
    sink, clock = Recorder(), Clock()
    monitor = make_monitor(sink, clock, epochs=1)
    monitor.begin()
    views = (WorkerView(0, "training", rows=10), WorkerView(1, "joining"))
    for _ in range(20):
        clock.now += 0.1
        monitor.update(replace(report(epoch(400, missing=1)), workers=views, bytes_in=7))
    found = sink.of(WorkersProgressed)
    assert 3 <= len(found) <= 5
    here = socket.gethostname()
    wanted = WorkersProgressed(views, 7, 0, driver_host=here)
    assert replace(found[0], driver_load=None) == wanted
    spans = Spans(1.0, np.zeros(1), np.zeros(1), 2.0)
    monitor.end_workers(replace(report(), workers=views[:1]), {1: spans, 0: spans})
    last = sink.of(WorkersProgressed)[-1]
    assert replace(last, driver_load=None) == WorkersProgressed(views[:1], driver_host=here)
    assert [e.rank for e in sink.of(WorkerTraced)] == [0, 1]


def test_workers_are_not_told_of_where_nobody_wants_progress() -> None:
    sink = Recorder(wants_progress=False)
    monitor = make_monitor(sink)
    monitor.begin()
    monitor.update(replace(report(), workers=(WorkerView(0, "training"),)))
    assert sink.of(WorkersProgressed) == []


def test_lines_are_told_at_most_twice_a_second_and_at_the_end() -> None:
    sink, clock = Recorder(), Clock()
    monitor = make_monitor(sink, clock, epochs=1)
    monitor.begin()
    looks = []
    for _ in range(20):
        clock.now += 0.1
        looks.append(monitor.lines_due())
    assert 3 <= sum(looks) <= 5
    monitor.hear([])  # nobody said anything: no event
    monitor.hear([(1, "a"), (0, "b")])
    assert sink.of(LinesLogged) == [LinesLogged(((1, "a"), (0, "b")))]
    assert monitor.lines_due() is False
    assert monitor.lines_due(last=True) is True
    assert make_monitor(Recorder(wants_progress=False)).lines_due(last=True) is False
