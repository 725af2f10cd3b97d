"""The clock of a rank's phases: no moment is lost, none counts twice."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sparkdl.progress.events import WorkerTraced
from sparkdl.training import phases
from sparkdl.training.phases import PHASES, PhaseClock, Spans, current_clock, joined, recording


class Time:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def seconds(clock: PhaseClock) -> dict[str, float]:
    return {phase: s for phase, s in clock.usage().seconds.items() if s}


def test_blocks_nest_and_the_phase_before_goes_on() -> None:
    time = Time()
    clock = PhaseClock(keeps_spans=True, now=time)
    time.now += 1
    clock.enter("compute")
    time.now += 2
    with clock.within("exchange"):
        time.now += 4
        with clock.within("wait"):
            time.now += 8
        time.now += 16
    time.now += 32
    assert seconds(clock) == {"start": 1, "compute": 34, "exchange": 20, "wait": 8}
    spans = clock.spans()
    assert spans is not None
    assert list(spans) == [
        ("start", 0, 1), ("compute", 1, 2), ("exchange", 3, 4), ("wait", 7, 8),
        ("exchange", 15, 16), ("compute", 31, 32),
    ]  # fmt: skip
    again = Spans.from_bytes(spans.to_bytes())
    assert (again.began_at, list(again)) == (spans.began_at, list(spans))


def test_making_the_items_of_a_generator_is_reading_and_using_them_is_not() -> None:
    time = Time()
    clock = PhaseClock(now=time)
    clock.enter("compute")
    closed = []

    def items():
        try:
            for item in range(3):
                time.now += 1
                yield item
            time.now += 5
        finally:
            closed.append(True)

    for _ in clock.each(items()):
        time.now += 10
    assert seconds(clock) == {"read": 8, "compute": 30}
    source = clock.each(items())
    next(source)
    source.close()
    assert closed == [True, True]


def test_an_exception_ends_a_block() -> None:
    time = Time()
    clock = PhaseClock(now=time)

    def fails() -> None:
        with clock.within("exchange"):
            time.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    time.now += 2
    assert seconds(clock) == {"start": 2, "exchange": 1}


def test_another_thread_counts_only_where_the_training_waits_for_it() -> None:
    time = Time()
    clock = PhaseClock(now=time)
    clock.enter("compute")

    def beside(any_thread: bool) -> None:
        with clock.within("exchange", any_thread=any_thread):
            time.now += 1

    for any_thread in (False, True):
        thread = threading.Thread(target=beside, args=(any_thread,))
        thread.start()
        thread.join()
    assert seconds(clock) == {"compute": 1, "exchange": 1}


def test_a_clock_is_current_in_its_block_and_its_thread() -> None:
    clock = PhaseClock()
    found: list[PhaseClock] = []
    with recording(clock):
        assert current_clock() is clock
        thread = threading.Thread(target=lambda: found.append(current_clock()))
        thread.start()
        thread.join()
    assert found[0] is not clock
    assert current_clock() is not clock


def test_spans_beyond_the_bound_are_joined_and_no_second_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phases, "MOST_SPANS", 100)
    time = Time()
    clock = PhaseClock(keeps_spans=True, now=time)
    for _ in range(5_000):
        for phase, step in (("read", 0.25), ("compute", 0.5), ("exchange", 0.125)):
            clock.enter(phase)  # type: ignore[arg-type]
            time.now += step
    spans = clock.spans()
    assert spans is not None
    found = list(spans)
    assert len(found) <= 100
    for phase in PHASES:
        total = sum(s for p, _, s in found if p == phase)
        assert total == pytest.approx(clock.usage().seconds[phase])
    starts = [start for _, start, _ in found]
    ends = [start + s for _, start, s in found]
    np.testing.assert_allclose(starts[1:], ends[:-1])


def test_joined_spans_of_one_bucket_have_each_phase_once() -> None:
    starts, order = joined(np.array([0.0, 1, 2, 3, 10]), np.array([2, 4, 2, 4, 2]), 12.0, 5.0)
    assert starts.tolist() == [0, 2, 10]  # 1 + 1 s of phase 2, then 1 + 7 s of phase 4
    assert order.tolist() == [2, 4, 2]


def test_usage_tells_processor_time_and_memory() -> None:
    usage = PhaseClock().usage(3, 4)
    assert usage.memory_bytes > 1 << 20
    assert usage.cpu_s > 0
    assert (usage.bytes_sent, usage.bytes_received) == (3, 4)


def test_the_phases_of_a_rank_print_as_one_line() -> None:
    spans = Spans(0.0, np.arange(500.0), np.zeros(500), 500.0)
    assert repr(spans) == "Spans(500 phases, 500 s)"
    assert len(repr(WorkerTraced(1, spans))) < 60
