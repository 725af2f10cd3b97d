"""A rank that is started again: how often, after which pauses, and not once the launch is over."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from sparkdl.launch.task import RankContext
from sparkdl.launch.threads import RestartedRanks


class Fails:
    """Counts its attempts and fails in all."""

    def __init__(self) -> None:
        self.began: list[tuple[int, float]] = []

    def run(self, rank: RankContext) -> Iterator[pa.RecordBatch]:
        self.began.append((rank.attempt, time.monotonic()))
        raise ValueError("no way on")
        yield  # makes it a generator


def test_each_pause_is_twice_as_long() -> None:
    fails = Fails()
    with pytest.raises(ValueError, match="no way on"):
        list(RestartedRanks([3], fails.run).run(RankContext(0)))
    assert [attempt for attempt, _ in fails.began] == [0, 1, 2, 3]
    times = [moment for _, moment in fails.began]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(p >= least for p, least in zip(pauses, (0.1, 0.2, 0.4), strict=True))


def test_a_launch_that_ends_during_a_pause_starts_nothing_again() -> None:
    fails, ended = Fails(), threading.Event()
    begun = time.monotonic()
    threading.Timer(0.3, ended.set).start()
    with pytest.raises(ValueError, match="no way on"):
        list(RestartedRanks([10**6], fails.run, ended).run(RankContext(0)))
    assert len(fails.began) < 4, "0.1 s + 0.2 s have passed after two"
    assert time.monotonic() - begun < 30


def test_pauses_do_not_grow_without_end() -> None:
    pauses: list[float] = []

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return len(pauses) == 2000

    with pytest.raises(ValueError, match="no way on"):
        list(RestartedRanks([10**6], Fails().run, Ended()).run(RankContext(0)))
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert max(pauses) == pauses[-1] == 5.0
