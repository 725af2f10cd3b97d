"""The loop with scripted parts: what is trained, exchanged and reported, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from plain_learner import InOne

from sparkdl import worker
from sparkdl.config import AUTO_WINDOW, EPOCH_WINDOW, LoopSettings
from sparkdl.data import Batches, ColumnSpec, DataSpec, read_partition, rows_from_numpy
from sparkdl.data.columns import Padding
from sparkdl.training.reports import Report
from sparkdl.training.syncing import Orders, Start
from sparkdl.worker import train


class Learner(InOne):
    """Counts rows; a 'weight' is the number of rows seen."""

    def __init__(self) -> None:
        self.step, self.learning_rate, self.has_schedule = 0, 0.1, False
        self.scales_loss = False
        self.rows: list[int] = []
        self.rates: list[float] = []
        self.told_steps: list[int] = []
        self.marks = 0
        self.filled: list[tuple[int, int]] = []
        self.skipped: list[int] = []

    def train(self, window: Any) -> None:
        self.rows.append(window.num_rows)

    def metric_state(self) -> Any:
        return np.array([float(sum(self.rows))])

    def reset_metrics(self) -> None: ...

    def set_learning_rate(self, value: float) -> None:
        self.rates.append(value)

    def set_step(self, step: int) -> None:
        self.told_steps.append(step)

    def mark_draws(self, *place: int) -> None:
        self.marks += 1

    def fill_draws(self, steps: int, steps_of_all: int) -> None:
        self.filled.append((steps, steps_of_all))

    def skip_draws(self, steps: int) -> None:
        self.skipped.append(steps)

    def evaluate(self, windows: Any) -> Any:
        return np.array([sum(w.num_rows for w in windows)], float)


class Synchronizer:
    """Notes every call; may stop after some exchanges or set a rate."""

    every_batch = False
    cuts_stacks = False

    def __init__(self, start: Start | None = None, stop_after: int = 10**9) -> None:
        self.begin = start or Start()
        self.stop_after = stop_after
        self.exchanges: list[Report] = []
        self.held: list[Report] = []
        self.ended: list[tuple[int, Any, Any]] = []
        self.evaluated: list[bool] = []
        self.kept: list[int] = []
        self.finished = False
        self.learning_rate: float | None = None
        self.announced: tuple[int, int, int] | None = None

    def start(self, learner: Any, rows: int, batches: int, windows: int) -> Start:
        self.announced = rows, batches, windows
        return self.begin

    def train(self, learner: Any, window: Any, report: Report) -> None:
        if window is not None:
            learner.train(window)
        self.exchanges.append(report)

    def train_on(self, learner: Any, window: Any, report: Report) -> None:
        learner.train(window)
        self.held.append(report)

    @contextlib.contextmanager
    def weights_of_run(self, learner: Any, last: bool) -> Iterator[None]:
        self.evaluated.append(last)
        yield

    def end_epoch(self, learner: Any, epoch: int, metrics: Any, held_out: Any, wait: bool) -> None:
        self.ended.append((epoch, metrics, held_out))

    def keep_state(self, learner: Any, epoch: int) -> None:
        self.kept.append(epoch)

    def take_changes(self, learner: Any) -> None:
        """There are none."""

    def finish(self, learner: Any, epoch: int) -> None:
        self.finished = True

    @property
    def orders(self) -> Orders:
        return Orders(len(self.exchanges) >= self.stop_after, self.learning_rate)


def run(
    rows: int, window: int, epochs: int = 1, sync: Synchronizer | None = None, *,
    at_once: int = 0, **options: Any,
):  # fmt: skip
    learner, sync = Learner(), sync or Synchronizer()
    source = Batches(rows_from_numpy(np.zeros((rows, 2)), np.zeros(rows)), 4, shuffle=False)
    settings = LoopSettings(epochs=epochs, batch_size=4, window=window, at_once=at_once)
    train(learner, sync, source, settings, num_rows=rows, **options)
    return learner, sync


def test_a_clock_keeps_the_state_only_of_workers_that_train_on_their_own(monkeypatch) -> None:
    """All ranks that train in step meet to keep it: their clocks do not pass a time together."""
    monkeypatch.setattr(worker, "_KEEP_S", 0.0)
    assert run(8, 1, epochs=2)[1].kept == [1, 2]
    assert run(8, 1, epochs=2, sync=Synchronizer(Start(windows_per_epoch=2)))[1].kept == []


@pytest.mark.parametrize("window", [1, 2, 3, 5, 16, 17, 40, EPOCH_WINDOW, AUTO_WINDOW])
@pytest.mark.parametrize("rows", [0, 1, 4, 7, 8, 30, 161])
def test_every_row_is_trained_once_per_epoch_and_exchanged(rows: int, window: int) -> None:
    learner, sync = run(rows, window, epochs=2)
    assert sum(learner.rows) == 2 * rows
    assert sum(r.rows for r in sync.exchanges) == 2 * rows  # the last partial window too
    assert sum(r.batches for r in sync.exchanges) == 2 * -(-rows // 4)
    assert [e[0] for e in sync.ended] == [0, 1]
    assert sync.finished
    announced = sync.announced
    assert announced is not None
    assert len(sync.exchanges) == 2 * announced[2]  # rounds are as many as was said
    if rows:
        assert sync.exchanges[-1].batches_done == -(-rows // 4)


@pytest.mark.parametrize(
    ("rows", "window", "stacks", "windows"),
    [
        (161, 1, [16, 16, 8, 1], 41),
        (161, 4, [16, 16, 8, 1], 11),
        (161, 5, [15, 15, 10, 1], 9),
        (161, 16, [16, 16, 8, 1], 4),
        (12, 4, [3], 1),
    ],
)
def test_a_stack_holds_several_windows_where_they_can_be_exchanged_within_it(
    rows: int, window: int, stacks: list[int], windows: int
) -> None:
    sync = Synchronizer()
    sync.cuts_stacks = True
    learner, _ = run(rows, window, epochs=2, sync=sync)
    assert [r.batches for r in sync.exchanges] == 2 * stacks
    assert {r.window for r in sync.exchanges} == {window}
    assert sync.exchanges[-1].windows_done == windows
    assert sync.announced == (rows, -(-rows // 4), windows)
    assert sum(learner.rows) == 2 * rows
    assert not sync.held


def test_windows_longer_than_a_stack_and_schedules_exchange_after_it() -> None:
    long, plain = Synchronizer(), Synchronizer()
    long.cuts_stacks = True
    run(400, 40, sync=long)
    run(400, 40, sync=plain)
    assert long.exchanges == plain.exchanges
    assert {r.window for r in long.exchanges} == {0}

    epoch = Synchronizer()  # of fewer batches than a stack, the last of them smaller
    epoch.cuts_stacks = True
    run(23, EPOCH_WINDOW, sync=epoch)
    assert [(r.batches, r.rows, r.window) for r in epoch.exchanges] == [(6, 23, 0)]

    sync = Synchronizer()
    sync.cuts_stacks = True
    learner = Learner()
    learner.has_schedule = True  # its rate depends on the steps of all, told after each window
    source = Batches(rows_from_numpy(np.zeros((40, 2)), np.zeros(40)), 4, shuffle=False)
    settings = LoopSettings(epochs=1, batch_size=4, window=2, follow_schedule=True)
    train(learner, sync, source, settings, num_rows=40, num_workers=2)
    assert learner.told_steps == [4, 8, 12, 16, 20]


def schedule_of(start: Start, epochs: int, first_epoch: int = 0, **options: Any) -> list[int]:
    """What one of two workers with 16 batches an epoch tells a learning-rate schedule."""
    learner, sync = Learner(), Synchronizer(start)
    learner.has_schedule, learner.step = True, 100  # the archive's
    sync.every_batch = not options.get("follow_schedule", True)
    source = Batches(rows_from_numpy(np.zeros((64, 2)), np.zeros(64)), 4, shuffle=False)
    settings = LoopSettings(
        epochs=epochs, first_epoch=first_epoch, batch_size=4, window=4, **options
    )
    train(learner, sync, source, settings, num_rows=64, num_workers=2)
    return learner.told_steps


@pytest.mark.parametrize("first_epoch", [0, 5])
def test_a_retried_worker_goes_on_in_its_learning_rate_schedule(first_epoch: int) -> None:
    whole = schedule_of(Start(), 10 - first_epoch)
    assert whole[-1] == 100 + 2 * 16 * (10 - first_epoch)
    retried = schedule_of(Start(epoch=8, position=4), 10, first_epoch)
    assert retried[0] == 100 + 2 * (16 * (8 - first_epoch) + 4)  # before its first batch
    assert retried[1:] == whole[1 - len(retried) :]


def test_a_worker_that_begins_takes_the_schedule_as_it_is() -> None:
    assert schedule_of(Start(), 1)[0] == 100 + 2 * 4
    assert schedule_of(Start(epoch=0), 6, 5)[0] == 100 + 2 * 4  # of a fit that is resumed


def test_rounds_are_the_steps_of_a_schedule_unless_the_optimizer_state_has_them() -> None:
    start = Start(epoch=2, position=3, windows_per_epoch=20)
    assert schedule_of(start, 3, follow_schedule=False) == [100 + 2 * 20 + 3]
    assert schedule_of(replace(start, with_optimizer=True), 3, follow_schedule=False) == []


@pytest.mark.parametrize("together", [True, False])
def test_every_report_has_the_rate_of_the_schedule_now(together: bool) -> None:
    class Falling(Learner):
        @property
        def learning_rate(self) -> float:  # type: ignore[override]
            return 1.0 - self.step / 100

        @learning_rate.setter
        def learning_rate(self, value: float) -> None: ...

        def train(self, window: Any) -> None:
            self.step += window.num_batches

        def set_step(self, step: int) -> None:
            self.step = step

    learner, sync = Falling(), Synchronizer()
    learner.has_schedule, learner.step = True, 10
    source = Batches(rows_from_numpy(np.zeros((40, 2)), np.zeros(40)), 4, shuffle=False)
    settings = LoopSettings(epochs=1, batch_size=4, window=2, follow_schedule=together)
    train(learner, sync, source, settings, num_rows=40, num_workers=2)
    every = 4 if together else 2  # the steps of all workers, or rounds
    assert [r.learning_rate for r in sync.exchanges] == pytest.approx(
        [0.9 - every * i / 100 for i in range(5)]
    )


def test_live_metrics_are_never_those_of_no_batch_of_the_epoch() -> None:
    """Metrics are read before the stack that a report is of, so the first has none to tell."""

    class Measured(Learner):
        def reset_metrics(self) -> None:
            self.rows = []

    learner, sync = Measured(), Synchronizer()
    source = Batches(rows_from_numpy(np.zeros((20, 2)), np.zeros(20)), 4, shuffle=False)
    settings = LoopSettings(epochs=3, batch_size=4, window=1, report_interval_s=0.0)
    train(learner, sync, source, settings, num_rows=20)
    told = [None if r.metrics is None else float(r.metrics[0]) for r in sync.exchanges]
    assert told == [None, 4.0, 8.0, 12.0, 16.0] * 3


def test_a_long_window_is_one_exchange() -> None:
    _, sync = run(400, EPOCH_WINDOW)
    assert len(sync.exchanges) == 1
    assert sync.exchanges[0].rows == 400
    assert len(sync.held) > 1


def test_the_automatic_window_is_at_most_a_sixteenth_of_an_epoch() -> None:
    _, long = run(4 * 640, AUTO_WINDOW)
    assert max(r.batches for r in long.exchanges) == 16
    _, short = run(4 * 48, AUTO_WINDOW)
    assert max(r.batches for r in short.exchanges) == 3
    _, tiny = run(8, AUTO_WINDOW)
    assert [r.batches for r in tiny.exchanges] == [1, 1]


@pytest.mark.parametrize(("workers", "window"), [(1, 16), (2, 16), (4, 8), (32, 1), (100, 1)])
def test_the_automatic_window_shrinks_with_the_number_of_workers(workers: int, window: int) -> None:
    _, sync = run(4 * 640, AUTO_WINDOW, num_workers=workers)
    assert {r.batches for r in sync.exchanges} == {window}


def test_workers_that_take_turns_do_not_shorten_the_automatic_window() -> None:
    _, sync = run(4 * 640, AUTO_WINDOW, num_workers=100, at_once=4)
    assert {r.batches for r in sync.exchanges} == {8}


def test_a_retried_task_goes_on_where_committed_work_ended() -> None:
    sync = Synchronizer(Start(epoch=1, position=5))
    learner, _ = run(30, 2, epochs=3, sync=sync)
    assert sum(learner.rows) == (30 - 5 * 4) + 30
    assert [e[0] for e in sync.ended] == [1, 2]


def test_work_that_another_attempt_finished_is_not_done_again() -> None:
    learner, sync = run(30, 2, sync=Synchronizer(Start(done=True)))
    assert learner.rows == []
    assert not sync.finished


def test_windows_are_padded_where_others_have_more() -> None:
    sync = Synchronizer(Start(windows_per_epoch=9))
    _, sync = run(30, 1, sync=sync)
    assert len(sync.exchanges) == 9
    assert [r.rows for r in sync.exchanges] == [4] * 7 + [2, 0]


def test_stop_ends_the_loop_without_the_epochs_end() -> None:
    sync = Synchronizer(stop_after=3)
    learner, _ = run(400, 1, epochs=5, sync=sync)
    assert len(learner.rows) == 3
    assert sync.ended == []
    assert sync.finished


def test_validation_rows_are_evaluated_after_each_epoch() -> None:
    held_out = Batches(rows_from_numpy(np.zeros((11, 2)), np.zeros(11)), 4, shuffle=False)
    _, sync = run(20, 2, epochs=2, validation=held_out)
    assert [float(e[2][0]) for e in sync.ended] == [11.0, 11.0]
    assert sync.evaluated == [False, True]  # the last one waits for the other workers


def test_batches_of_different_shapes_come_alone_in_windows_of_several() -> None:
    table = pa.table({"x": [[1.0] * (1 + i % 3) for i in range(20)], "y": [0] * 20})
    x = ColumnSpec(("x",), (None,), padding=Padding())
    spec = DataSpec({"x": x}, {"y": ColumnSpec(("y",), (), kind="scalars")})
    settings, learner, sync = LoopSettings(1, batch_size=4, window=3), Learner(), Synchronizer()
    with read_partition(table.to_batches(), spec) as partition:
        train(learner, sync, Batches(partition.train, 4, shuffle=False), settings)
    assert [(r.batches, r.rows) for r in sync.exchanges] == [(3, 12), (2, 8)]
    assert len(sync.held) == 3


def test_a_learning_rate_from_the_driver_is_set_once() -> None:
    sync = Synchronizer()
    sync.learning_rate = 0.01
    learner, _ = run(40, 1, epochs=2, sync=sync)
    assert learner.rates == [0.01]
    assert sync.exchanges[-1].learning_rate == 0.01


def test_a_rank_that_joins_late_takes_its_first_step_at_the_rate_of_the_others() -> None:
    class FirstRates(Learner):
        def train(self, window: Any) -> None:
            told.append(list(self.rates))

    told: list[list[float]] = []
    sync = Synchronizer(Start(epoch=1))
    sync.learning_rate = 0.01
    source = Batches(rows_from_numpy(np.zeros((8, 2)), np.zeros(8)), 4, shuffle=False)
    train(FirstRates(), sync, source, LoopSettings(epochs=2, batch_size=4, window=1), num_rows=8)
    assert told == [[0.01], [0.01]]
    assert sync.exchanges[0].learning_rate == 0.01


@pytest.mark.parametrize(("width", "longest"), [(10, 16), (10_000, 3), (100_000, 1)])
def test_large_rows_make_short_calls(
    width: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "STACK_BYTES", 1 << 20)
    rows = rows_from_numpy(np.zeros((40, width), np.float32), np.zeros(40, np.float32))
    learner, synchronizer = Learner(), Synchronizer()
    batches = Batches(rows, 8, shuffle=False)
    train(learner, synchronizer, batches, LoopSettings(1, window=40, shuffle=False))
    assert sum(learner.rows) == 40
    assert max(learner.rows) <= longest * 8
    assert len(synchronizer.exchanges) == 1  # the calls are shorter, the window is not
