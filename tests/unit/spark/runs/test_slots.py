"""The slot pool: in order, no half fits, and an error that names who holds the slots."""

from __future__ import annotations

import threading
import time

import pytest

from sparkdl.errors import ResourceError
from sparkdl.spark.runs.capacity import SlotPool


def test_two_that_need_all_slots_take_turns() -> None:
    pool, running, most = SlotPool(), [0], [0]

    def fit(name: str) -> None:
        with pool.take(2, 2, name, 60.0):
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.05)
            running[0] -= 1

    threads = [threading.Thread(target=fit, args=(f"fit {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]
    with pool.take(2, 2, "another", 0.0):  # all were given back
        pass


def test_a_small_one_does_not_overtake_a_large_one_that_waits() -> None:
    pool, order = SlotPool(), []

    def fit(name: str, slots: int) -> None:
        with pool.take(slots, 3, name, 60.0):
            order.append(name)

    with pool.take(2, 3, "first", 0.0):
        threads = []
        for name, slots in (("large", 3), ("small", 1)):
            threads.append(threading.Thread(target=fit, args=(name, slots)))
            threads[-1].start()
            while len(pool._waiting) < len(threads):
                time.sleep(0.01)
        time.sleep(0.3)
        assert order == []
    for thread in threads:
        thread.join(60)
    assert order == ["large", "small"]


def test_both_run_where_there_is_room_for_both() -> None:
    pool = SlotPool()
    with pool.take(2, 4, "one", 0.0):
        result: list[str] = []

        def fit() -> None:
            with pool.take(2, 4, "two", 0.0):
                result.append("runs")

        thread = threading.Thread(target=fit)
        thread.start()
        thread.join(60)
        assert result == ["runs"]


def test_who_waits_too_long_is_told_who_holds_the_slots() -> None:
    pool, errors = SlotPool(), []

    def fit() -> None:
        try:
            with pool.take(2, 2, "fit of model 'b'", 0.3):
                pass
        except ResourceError as error:
            errors.append(error)

    with pool.take(2, 2, "fit of model 'a'", 0.0):
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join(60)
    assert "fit of model 'a' (2 slots" in str(errors[0])


def test_a_fit_inside_a_fit_is_refused_at_once() -> None:
    pool = SlotPool()
    with (
        pool.take(2, 2, "outer", 0.0),
        pytest.raises(ResourceError, match="waits for itself"),
        pool.take(2, 2, "inner", 600.0),
    ):
        pass
    with pool.take(2, 2, "later", 0.0):
        pass


def test_more_workers_than_slots_take_them_all() -> None:
    pool = SlotPool()
    with pool.take(8, 2, "large", 0.0):
        assert pool._held[0].slots == 2
