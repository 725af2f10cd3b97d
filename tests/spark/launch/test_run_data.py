"""``run(fn, data=df)``: each rank gets a feed of its rows."""

from __future__ import annotations

import inspect
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import feather

import sparkdl
from sparkdl import Feeding, Limits
from sparkdl.errors import ConfigError, WorkerError

run = partial(sparkdl.run, communicator="builtin")
"""'auto' imports TensorFlow on each rank, to see whether Horovod is there."""


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
    padded = sparkdl.run(
        take, (16,), num_workers=2, data=df, feeding=Feeding(uneven="pad"), shuffle=True
    )
    assert padded[0][0] == padded[1][0]
    assert padded[0][1] | padded[1][1] == set(range(101))


def test_ranks_without_rows_join_the_others(spark: Any, tmp_path: Path) -> None:
    """The mean of 0 to 100 by a sum over all ranks at every batch, which all of them must reach."""
    path = str(tmp_path / "rows.parquet")
    spark.range(0, 101, 1, 3).selectExpr("id", "array(float(id), 2.0f) as x").write.parquet(path)

    def mean(feed: Any) -> tuple[float, list[int]]:
        total, sizes = np.zeros(2), []
        for batch in feed.batches(50):
            assert batch["x"].shape == (len(batch["id"]), 2)
            own = np.array([float(batch["id"].sum()), float(len(batch["id"]))])
            total += sparkdl.communicator().all_reduce(own)
            sizes.append(len(batch["id"]))
        return total[0] / total[1], sizes

    ranks = run(mean, num_workers=2, data=path, feeding=Feeding(uneven="join"), spark=spark)
    assert ranks == [(50.0, [50, 0]), (50.0, [50, 1])]


@pytest.mark.parametrize("uneven", ["drop", "pad", "join", "keep"])
def test_a_frame_without_rows_gives_an_empty_feed(spark: Any, uneven: Any) -> None:
    """Spark starts no task at all where it knows that there are none."""

    def take(feed: Any) -> tuple[int, bool, list[Any]]:
        ended, taken = feed.should_stop(), list(feed.batches(2))
        return sparkdl.communicator().rank, ended, taken

    rows = spark.range(4).selectExpr("id", "float(id) as x")
    local = pd.DataFrame({"x": np.zeros(0)})
    frames = [rows.where("x > 1000"), rows.limit(0), rows.where("1 = 0"), local]
    for data in frames if uneven == "drop" else frames[1:2]:
        ranks = run(take, num_workers=2, data=data, feeding=Feeding(uneven=uneven), spark=spark)
        assert ranks == [(0, True, []), (1, True, [])]


def test_a_frame_without_rows_beside_parameter_servers(spark: Any) -> None:
    def take(feed: Any) -> list[Any]:
        return list(feed.batches(2))

    rows = spark.range(4).limit(0)
    for on_driver in (True, False):
        ranks = run(
            take, data=rows, roles={"worker": 1, "ps": 1}, ps_on_driver=on_driver, spark=spark
        )
        assert ranks[0] == []


@pytest.mark.parametrize("column", ["string(id) as text", "timestamp_seconds(id) as moment"])
def test_parquet_files_by_their_path(spark: Any, tmp_path: Path, column: str) -> None:
    path = str(tmp_path / "rows.parquet")
    columns = "id", "array(float(id), 2.0f) as `a.b`", column
    spark.range(0, 101, 1, 3).selectExpr(*columns).write.parquet(path)

    def take(feed: Any) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in feed]

    shares = run(take, num_workers=2, data=path, feeding=Feeding(uneven="keep"), spark=spark)
    rows = sorted(row for share in shares for row in share)
    assert [row[:2] for row in rows] == [(n, [n, 2.0]) for n in range(101)]
    if "text" in column:  # read by the ranks; Spark deals the others
        assert [len(share) for share in shares] == [50, 51]
        assert [row[2] for row in rows] == [str(n) for n in range(101)]


def test_arrow_files_by_their_path(spark: Any, tmp_path: Path) -> None:
    table = pa.table({"n": list(range(101)), "x": [[n, n] for n in range(101)]})
    feather.write_feather(table, str(tmp_path / "rows.feather"), compression="uncompressed")

    def take(feed: Any) -> list[int]:
        seen: list[int] = []
        for batch in feed.batches(8):
            assert batch["x"].shape == (len(batch["n"]), 2)
            seen += batch["n"].tolist()
        return seen

    path = str(tmp_path / "rows.feather")
    first, second = run(take, num_workers=2, data=path, epochs=2, spark=spark)
    assert first == [*range(50)] * 2
    assert second == [*range(50, 100)] * 2
    first, second = run(
        take, num_workers=2, data=path, shuffle=True, feeding=Feeding(uneven="keep")
    )
    assert sorted(first + second) == list(range(101))
    assert first != sorted(first)


def test_a_function_that_fails_while_it_is_fed_raises_here(spark: Any) -> None:
    def fail(feed: Any) -> None:
        feed.next_batch(1)
        raise ValueError("bad row in the middle")

    with pytest.raises(WorkerError, match="bad row in the middle"):
        run(fail, num_workers=2, data=spark.range(100), epochs=None)
    with pytest.raises(ConfigError, match="cannot be fed"):
        run(fail, num_workers=2, data=[1, 2, 3])
    with pytest.raises(ConfigError, match="uneven"):
        run(fail, num_workers=2, data=spark.range(3), feeding=Feeding(uneven="split"))


def test_frameworks_take_the_feed(spark: Any) -> None:
    def train(feed: Any) -> tuple[int, float]:
        rows = 0
        for batch in feed.to_tf_data(8):
            rows += int(batch["id"].shape[0])
        return rows, feed.epoch

    assert run(train, num_workers=2, data=spark.range(64), feeding=Feeding(uneven="pad"))[0][1] == 1


def test_a_function_that_takes_no_rows_is_given_up(spark: Any) -> None:
    def work(feed: Any, hangs: bool) -> int:
        rows = len(feed.next_batch(10)["id"])
        while hangs:
            time.sleep(0.1)
        feed.terminate()
        time.sleep(1.5)  # an export after the last row may take its time
        return rows

    df = spark.range(100)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="a function that is fed takes no rows") as caught:
        run(work, (True,), num_workers=2, data=df, limits=Limits(stall_timeout_s=1))
    assert time.monotonic() - begun < 30
    assert "time.sleep(0.1)" in str(caught.value)
    assert run(work, (False,), num_workers=2, data=df, limits=Limits(stall_timeout_s=1)) == [10, 10]
    with pytest.raises(ConfigError, match="stall_timeout_s"):
        run(work, (False,), num_workers=2, limits=Limits(stall_timeout_s=1))


def test_a_function_is_watched_without_being_asked_for(spark: Any) -> None:
    """Nothing is said of a limit: there is one, of ten minutes."""
    assert inspect.signature(sparkdl.run).parameters["limits"].default.stall_timeout_s == 600.0

    def tell(feed: Any) -> bool:
        import threading

        feed.terminate()
        return threading.current_thread() is threading.main_thread()

    assert run(tell, num_workers=1, data=spark.range(4)) == [False], "it is watched"
    assert run(tell, num_workers=1, data=spark.range(4), limits=Limits(stall_timeout_s=None)) == [
        True
    ]
    assert run(int, num_workers=1) == [0]


def test_rows_go_to_the_first_ranks_alone(spark: Any, tmp_path: Path) -> None:
    def take(feed: Any) -> list[int]:
        return [int(number) for batch in feed.batches(8) for number in batch["id"]]

    roles = {"worker": 2, "ps": 1, "evaluator": 1}
    one_row_each = spark.range(0, 20, 1, 20)
    spark.range(21).write.parquet(str(tmp_path / "rows"))
    for data, count in ((one_row_each, 20), (str(tmp_path / "rows"), 21)):
        shares = run(take, data=data, roles=roles, feeding=Feeding(uneven="keep"), spark=spark)
        taken = [share or [] for share in shares]
        assert sorted(number for share in taken for number in share) == list(range(count))
        assert taken[2] == taken[3] == []
        assert min(len(share) for share in taken[:2]) >= count // 2 - 2


def test_inference_gives_a_result_for_each_row_in_order(spark: Any) -> None:
    df = spark.range(0, 100, 1, 3).selectExpr("id", "array(float(id), 2.0f) as `a.b`")

    def score(batches: Any, factor: float) -> Any:
        waiting = None
        for batch in batches:  # one batch behind
            assert 0 < len(batch["id"]) <= 16
            if waiting is not None:
                yield waiting
            waiting = {"sum": batch["a.b"].sum(axis=1) * factor, "pair": batch["a.b"][:, ::-1]}
        if waiting is not None:
            yield waiting

    schema = "sum double, pair array<float>"
    scored = sparkdl.inference(score, df, schema, (2.0,), batch_size=16)
    assert scored.columns == ["id", "a.b", "sum", "pair"]
    found = scored.collect()
    assert [row["id"] for row in found] == list(range(100))
    assert all(row["sum"] == 2 * (row["id"] + 2) for row in found)
    assert all(row["pair"] == [2.0, row["id"]] for row in found)


def test_what_inference_refuses(spark: Any) -> None:
    df = spark.range(0, 10, 1, 1)

    def short(batches: Any) -> Any:
        for batch in batches:
            yield batch["id"][:-1]

    def none(batches: Any) -> Any:
        yield from ()

    with pytest.raises(ConfigError, match="id, which are there"):
        sparkdl.inference(short, df, "id bigint")
    with pytest.raises(ConfigError, match="batch_size"):
        sparkdl.inference(short, df, "x bigint", batch_size=0)
    with pytest.raises(Exception, match="do not fit its rows"):
        sparkdl.inference(short, df, "x bigint").collect()
    with pytest.raises(Exception, match="a result for every batch"):
        sparkdl.inference(none, df, "x bigint").collect()
