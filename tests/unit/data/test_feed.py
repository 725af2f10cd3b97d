"""A rank's feed: batches, epochs, equal rows, shuffling, spilling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data.feed import Feed, RowSpool, equal_rows, size_of, to_numpy
from sparkdl.errors import ConfigError, DataError, ResourceError


def chunks(count: int = 10, size: int = 3) -> list[pa.RecordBatch]:
    table = pa.table({"x": list(range(count)), "v": [[i, i] for i in range(count)]})
    return table.to_batches(max_chunksize=size)


def taken(feed: Feed, size: int) -> list[list[int]]:
    return [batch["x"].tolist() for batch in feed.batches(size)]


def test_batches_end_with_the_epoch() -> None:
    feed = Feed(chunks(), epochs=2)
    first = feed.next_batch(4)
    assert first["x"].tolist() == [0, 1, 2, 3]
    assert first["v"].shape == (4, 2)
    assert taken(feed, 4) == [[4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert feed.should_stop()
    assert feed.epoch == 2
    assert feed.next_batch(4) == {}


def test_lists_of_no_rows_need_no_offsets() -> None:
    """As Spark 4.0 sends an empty partition: Arrow crashes where it is asked for their size."""
    nothing = pa.array([], pa.float32())
    lists = pa.Array.from_buffers(pa.list_(pa.float32()), 0, [None, None], children=[nothing])
    empty = pa.RecordBatch.from_arrays([lists], ["v"])
    outer = pa.ListArray.from_arrays(pa.array([0, 0], pa.int32()), lists)  # one row: []
    nested = pa.RecordBatch.from_arrays([outer], ["v"])
    assert (size_of(empty), size_of(nested)) == (0, 8)
    spool = RowSpool(1 << 20)
    for batch in (empty, nested):
        spool.add(batch)
    assert spool.num_rows == 1


def test_the_size_of_a_batch_is_that_of_arrow_where_it_tells_one() -> None:
    values = {
        "number": [1, 2, 3],
        "text": ["a", "bcd", ""],
        "list": [[1.0], [], [2.0, 3.0]],
        "nested": [[[1], []], [[2, 3]], [[4]]],
        "struct": [{"a": 1, "b": [1]}, {"a": 2, "b": []}, {"a": 3, "b": [2, 3]}],
        "map": pa.array([[(1, 2)], [], [(3, 4)]], pa.map_(pa.int64(), pa.int64())),
    }
    batch = pa.RecordBatch.from_pydict(values)
    assert size_of(batch) == pytest.approx(batch.nbytes, rel=0.2)
    part = pa.Table.from_batches([batch]).slice(1, 2)
    assert size_of(part) == pytest.approx(part.nbytes, rel=0.2)


def test_a_batch_within_a_chunk_is_not_copied_and_cannot_be_written() -> None:
    chunk = chunks(10, 10)[0]
    feed = Feed([chunk])
    for start in (0, 5):
        batch = feed.next_batch(5)
        assert np.shares_memory(batch["x"], chunk["x"].to_numpy())
        assert np.shares_memory(batch["v"], chunk["v"].flatten().to_numpy())
        assert batch["v"].tolist() == [[i, i] for i in range(start, start + 5)]
        assert not batch["x"].flags.writeable
        assert not batch["v"].flags.writeable


def test_batches_of_each_kind_of_column_are_those_of_arrow() -> None:
    table = pa.table(
        {
            "fixed": pa.array([[i, i + 1] for i in range(9)], pa.list_(pa.int16(), 2)),
            "large": pa.array([[float(i)] for i in range(9)], pa.large_list(pa.float32())),
            "deep": [[[i], [i]] for i in range(9)],
            "ragged": [[0] * (1 + i // 4) for i in range(9)],
            "null": [None, *range(8)],
            "inner": [[None] if i == 8 else [i] for i in range(9)],
            "text": list("abcdefghi"),
            "truth": [True, False, True] * 3,
        }
    ).slice(1)  # all buffers begin before the rows
    chunk = table.to_batches()[0]
    for number, batch in enumerate(Feed([chunk]).batches(4)):
        expected = chunk.slice(4 * number, 4)
        for name in table.column_names:
            plain = to_numpy(expected.column(name))
            assert batch[name].dtype == plain.dtype
            assert batch[name].shape == plain.shape
            assert str(batch[name].tolist()) == str(plain.tolist())


def test_rows_that_are_left_out_or_begin_again() -> None:
    assert taken(Feed(chunks(5), rows=3), 2) == [[0, 1], [2]]
    assert taken(Feed(chunks(3), rows=7), 4) == [[0, 1, 2, 0], [1, 2, 0]]
    assert taken(Feed([], rows=0, epochs=None), 4) == []
    with pytest.raises(ConfigError, match="without rows"):
        Feed([], rows=2)


def test_iteration_gives_rows_and_terminate_ends_them() -> None:
    feed = Feed(chunks(3))
    assert list(feed) == [{"x": i, "v": [i, i]} for i in range(3)]
    feed = Feed(chunks(), epochs=None)
    for number, _ in enumerate(feed.batches(4)):
        if number == 100:
            feed.terminate()
    assert number == 100
    assert feed.should_stop()


def test_each_epoch_has_an_order_of_its_own_and_each_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        return taken(Feed(chunks(100, 20), epochs=2, shuffle=True, seed=seed), 100)

    first, second = orders(1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert orders(1) == [first, second]
    assert orders(2)[0] != first


def test_rows_that_begin_again_within_an_epoch_keep_its_order() -> None:
    feed = Feed(chunks(30, 10), epochs=1, rows=90, shuffle=True, seed=4)
    first, *others = taken(feed, 30)
    assert first != sorted(first)
    assert others == [first, first]


def test_rows_beyond_the_budget_go_to_disk(tmp_path: Path) -> None:
    spool = RowSpool(budget_bytes=1000, directory=str(tmp_path))
    for batch in chunks(1000, 50):
        spool.add(batch)
    assert spool.num_rows == 1000
    assert sum(taken(Feed(spool.finish(), epochs=1), 64), []) == list(range(1000))  # noqa: RUF017
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="cannot spill"):
        RowSpool(0, str(tmp_path / "missing")).add(chunks()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_rows_on_disk_leave_memory_once_they_were_given(tmp_path: Path) -> None:
    """256 MB of rows, given twice: the process holds a few chunks of 8 MB at any time."""
    spool = RowSpool(budget_bytes=1 << 20, directory=str(tmp_path))
    chunk = pa.RecordBatch.from_pydict({"x": np.arange(2 << 20)})  # 16 MB
    for _ in range(16):
        spool.add(chunk)
    feed = Feed(spool.finish(), epochs=2)
    before, most, total = file_mb(), 0.0, 0
    while batch := feed.next_batch(1 << 20):
        total += int(batch["x"].sum())
        most = max(most, file_mb())
    assert total == 2 * 16 * int(np.arange(2 << 20).sum())
    assert most - before < 64


def file_mb() -> float:
    """Megabytes of mapped files in this process' memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1024


def test_equal_rows() -> None:
    assert equal_rows([5, 3, 0], "drop") == [0, 0, 0]
    assert equal_rows([5, 3], "pad") == [5, 5]
    assert equal_rows([5, 3], "keep") == [5, 3]
    assert equal_rows([0, 0], "pad") == [0, 0]
    assert equal_rows([5, 3], "join") == [5, 3]
    for uneven in ("pad", "join"):
        with pytest.raises(DataError, match="ranks 1 have no rows"):
            equal_rows([5, 0], uneven)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("shuffle", [False, True])
def test_who_joins_gives_as_many_batches_as_the_rank_with_most(size: int, shuffle: bool) -> None:
    """3 rows beside 8: the batches that the rows do not fill have fewer, or none, of the shape."""
    rows = pa.RecordBatch.from_pydict(
        {"n": np.arange(3), "x": [[1.0, 2.0]] * 3, "text": ["a"] * 3, "list": [[1], [], [2, 3]]}
    )
    feed = Feed([rows], epochs=2, joined=8, shuffle=shuffle)
    for epoch in range(2):
        assert feed.epoch == epoch
        batches = [feed.next_batch(size) for _ in range(math.ceil(8 / size))]
        begins = range(0, 8, size)
        assert [len(b["n"]) for b in batches] == [max(0, min(size, 3 - at)) for at in begins]
        assert all(len(b["text"]) == len(b["list"]) == len(b["n"]) for b in batches)
        assert all(b["x"].shape == (len(b["n"]), 2) for b in batches)
        assert all(b["n"].dtype == np.int64 for b in batches)
        assert sorted(n for b in batches for n in b["n"].tolist()) == [0, 1, 2]
    assert feed.should_stop()
    assert feed.next_batch(size) == {}
    assert list(Feed([rows.select(["n"])], joined=8)) == [{"n": n} for n in range(3)]


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_no_number_of_rows(size: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        Feed(chunks()).next_batch(size)


def test_columns_as_arrays() -> None:
    assert to_numpy(pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])).shape == (2, 2, 2)
    ragged = to_numpy(pa.array([[1], None, [2, 3]]))
    assert ragged.dtype == object
    assert [None if r is None else r.tolist() for r in ragged] == [[1], None, [2, 3]]
    assert to_numpy(pa.array(["a", "b"])).tolist() == ["a", "b"]
    assert to_numpy(pa.array([{"a": 1}])).tolist() == [{"a": 1}]
    assert np.isnan(to_numpy(pa.array([1.0, None]))[1])
    assert to_numpy(pa.array([[1, 2], [3, 4]]).slice(1)).tolist() == [[3, 4]]
