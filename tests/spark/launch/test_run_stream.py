"""``run(fn, data=stream)``: ranks that live as long as a stream, and take each row once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparkdl
from sparkdl import Feeding, Limits, Network
from sparkdl.errors import (
    ConfigError,
    ResourceError,
    SparkDLError,
    WaitTimeoutError,
    WorkerError,
)

WAIT_S = 240.0
NOW = {"availableNow": True}
FAST: dict[str, Any] = {"communicator": "builtin"}
"""'auto' would import TensorFlow, to see whether Horovod is there."""


@pytest.fixture
def source(spark: Any, tmp_path: Path) -> tuple[Any, Callable[[int, int], None]]:
    """A stream of one file for each micro-batch, and what writes a file of so many rows."""
    folder = tmp_path / "in"
    folder.mkdir()
    begun = [0]

    def write(number: int, rows: int) -> None:
        ids = range(begun[0], begun[0] + rows)
        begun[0] += rows
        hidden = folder / f".{number}.csv"  # Spark sees whole files only
        hidden.write_text("".join(f"{i},{i}.5\n" for i in ids))
        hidden.rename(folder / f"{number}.csv")

    stream = spark.readStream.schema("id long, x double").option("maxFilesPerTrigger", 1)
    return stream.csv(str(folder)), write


def take_ids(feed: Any, size: int) -> tuple[list[int], list[int], int]:
    """The ids, the number of the micro-batch of each batch, and the micro-batches."""
    ids, batches = [], []
    while not feed.should_stop():
        batch = feed.next_batch(size)
        assert (batch["x"] == batch["id"] + 0.5).all()
        assert 0 < len(batch["id"]) <= size
        ids += batch["id"].tolist()
        batches.append(feed.batch_id)
    assert feed.next_batch(size) == {}
    return ids, batches, feed.epoch


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_rows_come_while_the_ranks_live_and_a_restart_goes_on(
    spark: Any, source: Any, tmp_path: Path
) -> None:
    stream, write = source
    for number, rows in enumerate([10, 1, 33]):
        write(number, rows)
    feeding = Feeding(checkpoint_dir=str(tmp_path / "place"))
    options = {"num_workers": 2, "data": stream, "feeding": feeding, **FAST}
    run = sparkdl.run(take_ids, (4,), **options)
    until(lambda: run.batches_done == 3)
    assert run.is_active
    with pytest.raises(WaitTimeoutError, match="3 micro-batches were taken"):
        run.results  # noqa: B018
    assert not run.await_termination(0.1)
    write(3, 20)
    until(lambda: run.batches_done == 4)
    run.stop(WAIT_S)
    run.stop()
    assert not run.is_active
    assert run.exception is None
    assert run.await_termination(0)
    assert sorted(i for ids, _, _ in run.results for i in ids) == list(range(64))
    assert {b for _, batches, _ in run.results for b in batches} == {0, 1, 2, 3}
    assert [epoch for *_, epoch in run.results] == [4, 4]
    write(4, 7)
    again = sparkdl.run(
        take_ids, (4,), **{**options, "feeding": replace(options["feeding"], trigger=NOW)}
    )
    assert again.await_termination(WAIT_S)
    assert sorted(i for ids, _, _ in again.results for i in ids) == list(range(64, 71))


def test_an_error_and_a_stall_of_a_function_end_the_stream(spark: Any, source: Any) -> None:
    stream, write = source
    write(0, 50)

    def fail(feed: Any) -> None:
        feed.next_batch(4)
        if sparkdl.communicator().rank == 1:
            raise ValueError("bad row in the middle")
        while not feed.should_stop():
            feed.next_batch(4)

    def hang(feed: Any) -> None:
        feed.next_batch(4)
        while True:
            time.sleep(0.1)

    run = sparkdl.run(fail, num_workers=2, data=stream, **FAST)
    with pytest.raises(WorkerError, match="bad row in the middle") as caught:
        run.await_termination(WAIT_S)
    assert "in fail" in caught.value.traceback
    assert not run.query.isActive
    assert isinstance(run.exception, WorkerError)
    with pytest.raises(WorkerError, match="bad row"):
        run.results  # noqa: B018
    with pytest.raises(WorkerError, match="bad row"):
        run.stop()
    run = sparkdl.run(hang, num_workers=2, data=stream, **FAST, limits=Limits(stall_timeout_s=10))
    with pytest.raises(WorkerError, match="a function that is fed takes no rows") as caught:
        run.await_termination(WAIT_S)
    assert "time.sleep(0.1)" in str(caught.value)


@pytest.mark.slow
def test_a_function_ends_the_stream_and_what_it_left_comes_again(
    spark: Any, source: Any, tmp_path: Path
) -> None:
    stream, write = source
    write(0, 10)
    write(1, 10)

    def leave(feed: Any, how: str, size: int) -> int:
        rows = 0
        while not feed.should_stop():
            rows += len(feed.next_batch(size)["id"])
            if feed.batch_id == 1 and sparkdl.communicator().rank == 0:
                if how == "return":
                    return rows
                feed.terminate()
        return rows

    for how, size, done in [("terminate", 2, 1), ("return", 100, 2)]:
        place = str(tmp_path / how)
        options = {
            "num_workers": 2,
            "data": stream,
            "feeding": Feeding(checkpoint_dir=place),
            **FAST,
        }
        run = sparkdl.run(leave, (how, size), **options)
        assert run.await_termination(WAIT_S)
        assert not run.query.isActive
        assert run.batches_done == done
        again = sparkdl.run(
            take_ids, (100,), **{**options, "feeding": replace(options["feeding"], trigger=NOW)}
        )
        assert again.await_termination(WAIT_S)
        left = sorted(i for ids, _, _ in again.results for i in ids)
        assert left == list(range(10 * done, 20))


@pytest.mark.slow
def test_a_function_that_does_not_return_is_given_up(spark: Any, source: Any) -> None:
    stream, write = source
    write(0, 10)

    def stay(feed: Any) -> None:
        while not feed.should_stop():
            feed.next_batch(100)
        time.sleep(1000)

    run = sparkdl.run(stay, num_workers=2, data=stream, **FAST)
    until(lambda: run.batches_done == 1)
    begun = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="did not return"):
        run.stop(3.0)
    assert time.monotonic() - begun < 60
    assert not run.is_active


@pytest.mark.slow
def test_a_rank_that_is_killed_and_a_source_that_fails(spark: Any, source: Any) -> None:
    stream, write = source
    write(0, 10)

    def die(feed: Any) -> None:
        feed.next_batch(1)
        if sparkdl.communicator().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not feed.should_stop():
            feed.next_batch(1)

    run = sparkdl.run(die, num_workers=2, data=stream, **FAST)
    with pytest.raises(WorkerError, match="SIGKILL"):
        run.await_termination(WAIT_S)
    assert not run.query.isActive

    bad = stream.selectExpr("id", "if(id < 3, x, raise_error('no such value')) as x")
    run = sparkdl.run(take_ids, (4,), num_workers=2, data=bad, **FAST)
    with pytest.raises(SparkDLError, match="no such value"):
        run.await_termination(WAIT_S)
    assert not run.is_active


@pytest.mark.slow
@pytest.mark.parametrize("encrypt", [False, True])
def test_a_stop_lets_the_micro_batch_under_way_be_taken(
    spark: Any, source: Any, tmp_path: Path, encrypt: bool
) -> None:
    stream, write = source
    write(0, 20)
    write(1, 20)
    begun = tmp_path / "begun"

    def slow(feed: Any) -> int:
        rows = 0
        while not feed.should_stop():
            rows += len(feed.next_batch(2)["id"])
            begun.touch()
            time.sleep(0.4)
        return rows

    place = str(tmp_path / "place")
    options = {"num_workers": 2, "data": stream, "feeding": Feeding(checkpoint_dir=place), **FAST}
    run = sparkdl.run(slow, **options, network=Network(encrypt=encrypt))
    until(begun.exists)
    run.stop(WAIT_S)
    assert run.batches_done == 1
    assert sum(run.results) == 20
    again = sparkdl.run(
        take_ids, (4,), **{**options, "feeding": replace(options["feeding"], trigger=NOW)}
    )
    assert again.await_termination(WAIT_S)
    assert sorted(i for ids, _, _ in again.results for i in ids) == list(range(20, 40))


@pytest.mark.slow
def test_equal_steps_in_each_micro_batch(spark: Any, source: Any) -> None:
    stream, write = source
    write(0, 31)

    def count(feed: Any) -> list[int]:
        return [len(batch["id"]) for batch in feed.batches(4)]

    run = sparkdl.run(
        count,
        num_workers=2,
        data=stream,
        **FAST,
        shuffle=True,
        feeding=Feeding(uneven="pad", trigger=NOW),
    )
    assert run.await_termination(WAIT_S)
    assert run.results[0] == run.results[1]
    assert sum(run.results[0]) >= 16


def test_what_no_stream_can_feed(spark: Any, source: Any) -> None:
    stream, _ = source
    for wrong, said in [
        ({"epochs": 2}, "given once"),
        ({"epochs": None}, "given once"),
        ({"feeding": Feeding(uneven="join")}, "no batches without rows"),
        ({"feeding": {"trigger": "now"}}, "hint: from sparkdl import Feeding"),
        ({"feeding": 3}, "must be a sparkdl.Feeding"),
        ({"roles": {"ps": 1}, "num_workers": None}, "a chief or workers"),
        ({"data": None, "feeding": Feeding(trigger=NOW)}, "has none"),
        ({"data": spark.range(3), "feeding": Feeding(checkpoint_dir="x")}, "has none"),
    ]:
        with pytest.raises(ConfigError, match=said):
            sparkdl.run(take_ids, (4,), **{"num_workers": 1, "data": stream, **wrong})
    with pytest.raises(ResourceError, match="at least 5 slots"):
        sparkdl.run(take_ids, (4,), num_workers=4, data=stream)
