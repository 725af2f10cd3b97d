"""Batches: every row once, the same order again, and no thread left."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data import (
    Batches,
    ColumnSpec,
    DataSpec,
    EpochPlan,
    read_partition,
    rows_from_numpy,
    to_arrow_table,
)
from sparkdl.errors import ConfigError, DataError


def make_rows(num_rows, spilled=False):
    x = np.arange(num_rows * 2, dtype=np.float32).reshape(num_rows, 2)
    y = np.arange(num_rows, dtype=np.int32)
    if not spilled:
        return rows_from_numpy(x, y, y.astype(np.float32))
    table, spec = to_arrow_table(x, y, y.astype(np.float32))
    rows = read_partition(iter(table.to_batches(max_chunksize=7)), spec, 320).train
    assert (rows.storage.block_rows is None) is (num_rows <= 20)
    return rows


def labels(stacks):
    return [w.y["label"].ravel().tolist() for w in stacks]


def flat(stacks):
    return [number for part in labels(stacks) for number in part]


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("sparkdl-batches")]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 130),
    batch_size=st.integers(1, 40),
    most_batches=st.integers(1, 6),
    shuffle=st.booleans(),
    spilled=st.booleans(),
    prefetch=st.integers(0, 3),
    seed=st.integers(-(2**70), 2**70),
)
def test_every_row_exactly_once(
    num_rows, batch_size, most_batches, shuffle, spilled, prefetch, seed
):
    rows = make_rows(num_rows, spilled)
    batches = Batches(rows, batch_size, shuffle=shuffle, seed=seed, prefetch=prefetch)
    found = list(batches.stacks(0, most_batches))
    assert sorted(flat(found)) == list(range(num_rows))
    assert (
        sum(w.num_batches for w in found) == batches.steps_per_epoch == -(-num_rows // batch_size)
    )
    for w in found:
        assert 1 <= w.num_batches <= most_batches
        per_batch = w.num_rows // w.num_batches
        assert per_batch == batch_size or (w is found[-1] and w.num_batches == 1)
        assert w.x["features"].shape == (w.num_batches, per_batch, 2)
        assert w.y["label"].shape == (w.num_batches, per_batch)
        np.testing.assert_array_equal(w.x["features"][..., 0], w.y["label"] * 2)
        np.testing.assert_array_equal(w.sample_weight["label"], w.y["label"])
    if not shuffle:
        assert flat(found) == list(range(num_rows))


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 130),
    batch_size=st.integers(1, 20),
    start=st.integers(0, 20),
    epoch=st.integers(0, 5),
    spilled=st.booleans(),
)
def test_a_retried_task_continues_where_it_was(num_rows, batch_size, start, epoch, spilled):
    def run(start_batch, most_batches):
        batches = Batches(make_rows(num_rows, spilled), batch_size, seed=3, rank=2)
        return flat(batches.stacks(epoch, most_batches, start_batch))

    assert run(start, 3) == run(0, 2)[start * batch_size :]


def test_batches_one_by_one():
    batches = Batches(make_rows(10), 4, seed=1)
    found = list(batches.stacks(2, 1))
    assert [b.num_rows for b in found] == [4, 4, 2]
    assert found[2].x["features"].shape == (1, 2, 2)
    assert found[0].sample_weight["label"].shape == (1, 4)
    assert flat(found) == flat(batches.stacks(2, 5))
    assert [b.num_rows for b in batches.stacks(2, 1, 1)] == [4, 2]


@pytest.mark.parametrize("spilled", [False, True])
def test_epochs_ranks_and_seeds_differ(spilled):
    rows = make_rows(100, spilled)
    orders = [
        flat(Batches(rows, 10, seed=seed, rank=rank).stacks(epoch, 4))
        for seed, rank, epoch in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == flat(Batches(rows, 10, seed=0).stacks(0, 9))


def test_the_order_stays_the_same_between_versions():
    """A checkpoint of an older version must resume in the same order."""
    assert flat(Batches(make_rows(8), 8, seed=7, rank=1).stacks(3, 1)) == [7, 5, 3, 1, 0, 6, 4, 2]


def test_a_shuffle_is_uniform():
    counts = np.zeros((5, 5))
    batches = Batches(make_rows(5), 5, prefetch=0)
    for epoch in range(2000):
        counts[np.arange(5), flat(batches.stacks(epoch, 1))] += 1
    assert abs(counts / 2000 - 0.2).max() < 0.04


def test_without_shuffle_nothing_is_copied():
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    stacks = list(Batches(rows_from_numpy(x), 2, shuffle=False).stacks(0, 2))
    assert all(np.shares_memory(w.x["features"], x) for w in stacks)
    assert stacks[0].y == {}
    assert stacks[0].sample_weight is None


def test_a_stack_is_not_overwritten_by_later_ones():
    stacks = list(Batches(make_rows(64), 4).stacks(0, 2))
    assert sorted(flat(stacks)) == list(range(64))
    arrays = [w.x["features"] for w in stacks]
    assert not any(np.shares_memory(a, b) for a, b in itertools.pairwise(arrays))


def test_the_thread_ends_with_the_epoch():
    iterator = Batches(make_rows(100), 4).stacks(0, 2)
    next(iterator)
    assert threads()
    assert len(list(iterator)) == 12
    assert not threads()


def test_the_thread_ends_on_close_break_and_error():
    iterator = Batches(make_rows(100), 4).stacks(0, 2)
    next(iterator)
    iterator.close()
    assert not threads()
    for _ in Batches(make_rows(100), 4).stacks(0, 2):
        break
    gc.collect()
    assert not threads()

    def train():
        for _ in Batches(make_rows(100), 4).stacks(0, 2):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    assert not threads()


def test_what_a_gather_raises_is_raised_to_the_reader():
    rows = make_rows(100)
    batches = Batches(rows, 4)
    iterator = batches.stacks(0, 2)
    next(iterator)
    rows.close()
    with pytest.raises(DataError, match="closed"):
        list(iterator)
    gc.collect()
    assert not threads()


def test_the_next_stack_is_gathered_meanwhile(monkeypatch):
    batches = Batches(make_rows(8), 4)
    done = []
    take = batches.rows.take

    def slow(indices):
        time.sleep(0.05)
        batch = take(indices)
        done.append(len(indices))
        return batch

    monkeypatch.setattr(batches.rows, "take", slow)
    iterator = batches.stacks(0, 1)
    next(iterator)
    deadline = time.monotonic() + 5
    while len(done) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(done) == 2
    assert len(list(iterator)) == 1


def test_plans_known_answers():
    plan = EpochPlan(10, 4)
    assert (plan.steps_per_epoch, plan.full_batches, plan.tail_rows) == (3, 2, 2)
    assert list(plan.stacks(1)) == [(0, 1), (1, 1), (2, 1)]
    assert list(plan.stacks(5, 2)) == [(2, 1)]
    assert list(plan.stacks(5, 3)) == []
    assert list(EpochPlan(3, 4).stacks(2)) == [(0, 1)]
    assert list(EpochPlan(8, 4).stacks(2, 1)) == [(1, 1)]
    assert list(EpochPlan(0, 4).stacks(2)) == []


@pytest.mark.parametrize(("rows", "size"), [(1, 0), (1, -1), (-1, 1)])
def test_impossible_plans_are_refused(rows, size):
    with pytest.raises(ConfigError):
        EpochPlan(rows, size)


@pytest.mark.parametrize(("most_batches", "start"), [(0, 0), (1, -1)])
def test_impossible_stacks_are_refused(most_batches, start):
    with pytest.raises(ConfigError):
        list(EpochPlan(5, 2).stacks(most_batches, start))


# -- epochs of a number of steps -----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    steps=st.integers(1, 9),
    most_batches=st.integers(1, 4),
    shuffle=st.booleans(),
    spilled=st.booleans(),
)
def test_epochs_of_some_steps_go_on_where_the_last_one_ended(
    num_rows, batch_size, steps, most_batches, shuffle, spilled
):
    rows = make_rows(num_rows, spilled)
    batches = Batches(rows, batch_size, shuffle=shuffle, seed=3, steps=steps, repeat=True)
    assert batches.steps_per_epoch == batches.full_batches == steps
    seen = []
    for epoch in range(4):
        epoch_rows = flat(batches.stacks(epoch, most_batches))
        assert len(epoch_rows) == steps * batch_size
        again = flat(batches.stacks(epoch, most_batches, start_batch=steps - 1))
        assert again == epoch_rows[-batch_size:]  # a retried task goes on inside an epoch
        seen += epoch_rows
    passes = [seen[i : i + num_rows] for i in range(0, len(seen), num_rows)]
    for one in passes[: len(seen) // num_rows]:
        assert sorted(one) == list(range(num_rows))
    if not shuffle:
        assert seen == [i % num_rows for i in range(len(seen))]


def test_without_repeating_steps_are_the_first_ones():
    rows = make_rows(10)
    assert flat(Batches(rows, 3, shuffle=False, steps=2).stacks(0, 8)) == list(range(6))
    assert flat(Batches(rows, 3, shuffle=False, steps=9).stacks(0, 8)) == list(range(10))
    empty = Batches(make_rows(0), 3, steps=4, repeat=True)
    assert empty.steps_per_epoch == 0
    assert not list(empty.stacks(0, 8))


# -- class weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "classes", "want"),
    [
        ([0, 2, 1, 5], 6, [1.0, 4.0, 0.5, 1.0]),  # class numbers; 0 and 5 are not named
        ([[0], [2], [1], [5]], 6, [1.0, 4.0, 0.5, 1.0]),
        ([[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0.4, 0.6]], None, [1.0, 4.0, 0.5, 4.0]),  # one-hot
        ([0.0, 1.0, 0.9, 2.2], None, [1.0, 0.5, 0.5, 4.0]),  # binary labels are floats
        ([[0, 2], [1, 1], [2, 0], [0, 0]], 3, [[1, 4], [0.5, 0.5], [4, 1], [1, 1]]),  # sequences
    ],
)
def test_rows_weigh_what_their_class_does(labels, classes, want):
    y = np.array(labels, np.float32 if classes is None else np.int32)
    label = ColumnSpec(("y",), y.shape[1:], y.dtype.name, classes=classes)
    spec = DataSpec({"x": ColumnSpec(("x",), (1,))}, {"out": label})
    rows = rows_from_numpy({"x": np.zeros((4, 1))}, {"out": y}, spec=spec)
    batches = Batches(rows, 2, shuffle=False, class_weight={1: 0.5, 2: 4.0})
    found = np.concatenate([s.sample_weight["out"][0] for s in batches.stacks(0, 1)])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, want)


def rows_in_groups(groups):
    rows = np.arange(len(groups), dtype=np.float32)[:, None]
    table, spec = to_arrow_table(rows, rows)
    table = table.append_column("group", pa.array(groups, pa.int64()))
    spec = replace(spec, group=ColumnSpec(("group",), (), "int64", "scalars"))
    return read_partition(iter(table.to_batches(max_chunksize=7)), spec).train


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.integers(-5, 9), max_size=60),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_group_is_whole_in_one_batch(groups, batch_size, shuffle, seed):
    batches = Batches(rows_in_groups(groups), batch_size, shuffle=shuffle, seed=seed, prefetch=0)
    for epoch in (0, 1):
        found = labels(batches.stacks(epoch, 4))
        assert len(found) == batches.steps_per_epoch
        assert sorted(itertools.chain(*found)) == list(range(len(groups)))
        for batch in found:
            held = [groups[int(row)] for row in batch]
            assert len(batch) <= batch_size or len(set(held)) == 1
            for group in set(held):
                mine = [int(row) for row in batch if groups[int(row)] == group]
                assert mine == [i for i, other in enumerate(groups) if other == group]
        assert found == labels(batches.stacks(epoch, 1))
    assert batches.num_rows == len(groups)


def test_batches_of_groups_have_another_order_in_each_epoch():
    batches = Batches(rows_in_groups([i // 2 for i in range(64)]), 4, seed=1)
    first, second = (labels(batches.stacks(epoch, 1)) for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert labels(batches.stacks(0, 1, start_batch=14)) == first[14:]
