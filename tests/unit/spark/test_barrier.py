"""A rank of a barrier stage fails only when no other can still be inside the exchange of texts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from sparkdl.errors import WaitTimeoutError
from sparkdl.spark.executor import barrier
from sparkdl.spark.executor.barrier import BarrierGathering


class Context:
    """A task's context whose exchange ends when it is told to."""

    def __init__(self) -> None:
        self.answered = threading.Event()

    def partitionId(self) -> int:
        return 1

    def allGather(self, text: str) -> list[str]:
        self.answered.wait(30)
        return ["other", text]


def settled_after(gathering: BarrierGathering) -> float:
    began = time.monotonic()
    gathering.settle()
    return time.monotonic() - began


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "_LEAVING_S", 1.0)


def test_without_an_exchange_a_failure_is_told_at_once() -> None:
    assert settled_after(BarrierGathering(Context())) < 0.5


def test_soon_after_an_exchange_it_waits_and_later_it_does_not() -> None:
    context = Context()
    context.answered.set()
    gathering = BarrierGathering(context)
    assert gathering.all_gather("mine", 30) == ["other", "mine"]
    left = time.monotonic()
    gathering.settle()
    assert time.monotonic() - left >= 0.9
    assert settled_after(gathering) < 0.5  # training that fails an hour later


def test_an_exchange_that_others_are_still_to_come_to_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context: Any = Context()
    gathering = BarrierGathering(context)
    with pytest.raises(WaitTimeoutError):
        gathering.all_gather("mine", 0.05)
    monkeypatch.setattr(barrier, "_ALL_COME_S", 0.2)
    assert 0.15 <= settled_after(gathering) < 5
    context.answered.set()
    assert gathering._left.wait(10)
    assert settled_after(gathering) >= 0.5
