"""``run(fn, data=df)``: each rank gets a feed of its rows."""

from __future__ import annotations

from typing import Any

import pytest

import sparkdl
from sparkdl.errors import ConfigError, WorkerError


def test_every_rank_takes_equal_steps(spark: Any) -> None:
    df = spark.range(101).selectExpr("id", "array(float(id), 2.0f) as `a.b`", "string(id) as text")

    def take(feed: Any, size: int) -> tuple[int, set[int], tuple[int, ...]]:
        sizes, seen = [], set()
        while not feed.should_stop():
            batch = feed.next_batch(size)
            sizes.append(len(batch["id"]))
            seen |= set(batch["id"].tolist())
            assert batch["a.b"].shape == (len(batch["id"]), 2)
            assert batch["text"][0] == str(batch["id"][0])
        return sum(sizes), seen, tuple(sizes)

    dropped = sparkdl.run(take, (16,), num_workers=2, data=df, epochs=2, spark=spark)
    assert dropped[0][0] == dropped[1][0]
    assert dropped[0][2] == dropped[1][2]
    assert not dropped[0][1] & dropped[1][1]
    padded = sparkdl.run(take, (16,), num_workers=2, data=df, uneven="pad", shuffle=True)
    assert padded[0][0] == padded[1][0]
    assert padded[0][1] | padded[1][1] == set(range(101))


def test_a_function_that_fails_while_it_is_fed_raises_here(spark: Any) -> None:
    def fail(feed: Any) -> None:
        feed.next_batch(1)
        raise ValueError("bad row in the middle")

    with pytest.raises(WorkerError, match="bad row in the middle"):
        sparkdl.run(fail, num_workers=2, data=spark.range(100), epochs=None)
    with pytest.raises(ConfigError, match="cannot be fed"):
        sparkdl.run(fail, num_workers=2, data=[1, 2, 3])
    with pytest.raises(ConfigError, match="uneven"):
        sparkdl.run(fail, num_workers=2, data=spark.range(3), uneven="join")


def test_frameworks_take_the_feed(spark: Any) -> None:
    def train(feed: Any) -> tuple[int, float]:
        rows = 0
        for batch in feed.to_tf_data(8):
            rows += int(batch["id"].shape[0])
        return rows, feed.epoch

    assert sparkdl.run(train, num_workers=2, data=spark.range(64), uneven="pad")[0][1] == 1
