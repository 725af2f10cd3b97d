"""A rank of a barrier stage fails only when no other can still be inside the exchange of texts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from sparkdl.errors import WaitTimeoutError
from sparkdl.spark.executor import stage
from sparkdl.spark.executor.stage import BarrierGathering


class Context:
    """A task's context whose exchange ends when it is told to."""

    def __init__(self) -> None:
        self.answered = threading.Event()

    def partitionId(self) -> int:
        return 1

    def allGather(self, text: str) -> list[str]:
        self.answered.wait(30)
        return ["other", text]


class Clock:
    """Time that passes by sleeping only; ``slept`` has the seconds of each sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stage, "time", made)
    monkeypatch.setattr(stage, "_LEAVING_S", 1.0)
    return made


def test_without_an_exchange_a_failure_is_told_at_once(clock: Clock) -> None:
    BarrierGathering(Context()).settle()
    assert clock.slept == []


def test_soon_after_an_exchange_it_waits_and_later_it_does_not(clock: Clock) -> None:
    context = Context()
    context.answered.set()
    gathering = BarrierGathering(context)
    assert gathering.all_gather("mine", 30) == ["other", "mine"]
    gathering.settle()
    assert clock.slept == [pytest.approx(1.0)]
    clock.now += 3600.0
    gathering.settle()  # training that fails an hour later
    assert clock.slept[1:] == [0.0]


def test_an_exchange_that_others_are_still_to_come_to_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    context: Any = Context()
    gathering = BarrierGathering(context)
    with pytest.raises(WaitTimeoutError):
        gathering.all_gather("mine", 0.05)
    monkeypatch.setattr(stage, "_ALL_COME_S", 0.2)
    began = time.monotonic()
    gathering.settle()
    assert 0.15 <= time.monotonic() - began < 5
    assert clock.slept == []
    context.answered.set()
    assert gathering._left.wait(10)
    gathering.settle()
    assert clock.slept == [pytest.approx(1.0)]
