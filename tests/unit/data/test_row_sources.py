"""Rows of a feed that are read as they are taken: again, or kept; readers end with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pyarrow as pa
import pytest

from sparkdl.data.feed import Feed, RowSpool
from sparkdl.data.shards import read_files
from sparkdl.launch.feeding import RereadRows, RowsKeptAsRead


def source(counts: list[int], calls: list[int]) -> Callable[[], Generator[pa.RecordBatch]]:
    def read() -> Generator[pa.RecordBatch]:
        calls.append(1)
        at = 0
        for count in counts:
            yield pa.RecordBatch.from_pydict({"x": pa.array(range(at, at + count), pa.int64())})
            at += count

    return read


def taken(feed: Feed) -> list[int]:
    return [value for batch in feed.batches(4) for value in batch["x"].tolist()]


@pytest.mark.parametrize("budget", [1 << 20, 1])
def test_rows_are_read_once_and_kept(tmp_path: Path, budget: int) -> None:
    calls: list[int] = []
    spool = RowSpool(budget, str(tmp_path))
    rows = RowsKeptAsRead(source([3, 0, 5, 2], calls), 10, spool)
    assert taken(Feed(rows, epochs=3)) == [*range(10)] * 3
    assert len(calls) == 1


def test_an_epoch_that_leaves_rows_out_or_begins_again() -> None:
    calls: list[int] = []
    rows = RowsKeptAsRead(source([3, 3, 4], calls), 10, RowSpool(1 << 20))
    assert taken(Feed(rows, epochs=2, rows=8)) == [*range(8)] * 2
    rows = RowsKeptAsRead(source([3, 3, 4], calls), 10, RowSpool(1 << 20))
    assert taken(Feed(rows, epochs=2, rows=13)) == [*range(10), 0, 1, 2] * 2
    assert len(calls) == 2


def test_rows_that_are_read_again() -> None:
    calls: list[int] = []
    assert taken(Feed(RereadRows(source([5], calls), 5), epochs=3)) == [*range(5)] * 3
    assert len(calls) == 3
    assert taken(Feed(RereadRows(source([], calls), 0), epochs=None)) == []


def test_what_fails_while_it_is_read_ahead_is_raised_where_rows_are_taken() -> None:
    def read() -> Generator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"x": [1, 2]})
        raise OSError("the disk is gone")

    feed = Feed(RereadRows(lambda: read_files([lambda: [read]]), 4))
    assert feed.next_batch(2)["x"].tolist() == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        feed.next_batch(2)


@pytest.mark.parametrize("kept", [False, True])
def test_the_readers_end_with_the_feed(kept: bool) -> None:
    def read() -> Generator[pa.RecordBatch]:
        return read_files([lambda: [source([1] * 100, [])]])

    before = {*threading.enumerate()}
    rows = RowsKeptAsRead(read, 100, RowSpool(1 << 20)) if kept else RereadRows(read, 100)
    feed = Feed(rows)
    feed.next_batch(1)
    assert {*threading.enumerate()} - before
    feed.terminate()
    assert {*threading.enumerate()} <= before
    assert feed.next_batch(1) == {}
