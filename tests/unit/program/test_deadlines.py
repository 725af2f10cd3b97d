"""The time limit of calls that nobody waits for."""

from __future__ import annotations

import queue
import threading
import time

from sparkdl.program.calls import Deadlines


def watching() -> bool:
    return any(thread.name == "sparkdl-deadlines" for thread in threading.enumerate())


def test_calls_that_take_too_long_are_told_in_their_order() -> None:
    passed: queue.SimpleQueue[int] = queue.SimpleQueue()
    deadlines = Deadlines(0.2, passed.put)
    for number in range(5):
        deadlines.add(number)
    deadlines.take_out(1)
    deadlines.take_out(17)  # not known, or told already
    assert [passed.get(timeout=30) for _ in range(4)] == [0, 2, 3, 4]
    deadlines.add(5)
    assert passed.get(timeout=30) == 5
    ends_at = time.monotonic() + 30
    while watching():  # nothing is left to watch
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    assert passed.empty()


def test_it_ends_at_once_and_begins_again() -> None:
    passed: queue.SimpleQueue[int] = queue.SimpleQueue()
    deadlines = Deadlines(3600.0, passed.put)
    deadlines.add(1)
    assert watching()
    deadlines.close()
    ends_at = time.monotonic() + 30
    while watching():
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    deadlines.add(2)
    assert watching()
    deadlines.close()
    assert passed.empty()
