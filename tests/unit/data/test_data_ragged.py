"""Rows of different length: padded batch by batch, with a mask; texts; in memory and on disk."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import Batches, ColumnSpec, DataSpec, decode, read_partition
from sparkdl.data.columns import Padding, Ragged
from sparkdl.errors import ConfigError, DataError

LENGTHS = [3, 0, 5, 1, 2, 5, 4, 1, 2, 3, 6]
ROWS = [[100 * i + j for j in range(n)] for i, n in enumerate(LENGTHS)]
ZERO = Padding(0.0)


def make_spec(shape=(None,), dtype="float32", **padding):
    x = ColumnSpec(("x",), shape, dtype, padding=Padding(**padding))
    return DataSpec({"x": x}, {"y": ColumnSpec(("y",), (), "int32", "scalars")})


def make_table(rows=ROWS, kind=None):
    kind = pa.list_(pa.int32()) if kind is None else kind
    return pa.table({"x": pa.array(rows, kind), "y": np.arange(len(rows))})


def padded(numbers, width, value=0):
    return [ROWS[n] + [value] * (width - LENGTHS[n]) for n in numbers]


@pytest.mark.parametrize("budget", [1 << 30, 40, 1])
@pytest.mark.parametrize("chunk", [3, 100])
def test_a_batch_is_as_long_as_its_longest_row(budget, chunk, tmp_path):
    batches = make_table().to_batches(max_chunksize=chunk)
    with read_partition(batches, make_spec(value=-1), budget, str(tmp_path)) as partition:
        rows = partition.train
        assert (rows.storage.block_rows is None) is (budget == 1 << 30)
        stacks = list(Batches(rows, 4, shuffle=False).stacks(0, 8))
        assert [s.num_batches for s in stacks] == [1, 1, 1]
        for first, stack, width in zip((0, 4, 8), stacks, (5, 5, 6), strict=True):
            numbers = range(first, min(first + 4, 11))
            assert stack.x["x"].dtype == np.float32
            np.testing.assert_array_equal(stack.x["x"][0], padded(numbers, width, -1))
        taken = rows.take([3, 1, 7])  # the longest has one position
        np.testing.assert_array_equal(taken.x["x"], padded([3, 1, 7], 1, -1))


@pytest.mark.parametrize("budget", [1 << 30, 40])
def test_a_shuffled_epoch_has_every_row_with_its_label(budget):
    with read_partition(make_table().to_batches(), make_spec(), budget) as partition:
        found = []
        for stack in Batches(partition.train, 3, seed=5).stacks(2, 4):
            for row, label in zip(stack.x["x"][0], stack.y["y"][0], strict=True):
                assert row.tolist() == padded([label], len(row))[0]
                found.append(label)
    assert sorted(found) == list(range(11))


def test_roles_and_slices_keep_their_rows():
    table = make_table().append_column("role", pa.array([0, 1] * 5 + [0], pa.int8()))
    spec = DataSpec(make_spec().features, make_spec().labels, role_column="role")
    batches = [b.slice(1, 2) for b in table.to_batches()] + [b.slice(3) for b in table.to_batches()]
    with read_partition(batches, spec) as partition:
        held_out = partition.validation.slice(0, 99)
        np.testing.assert_array_equal(held_out.x["x"], padded([1, 3, 5, 7, 9], 5))
        assert held_out.y["y"].tolist() == [1, 3, 5, 7, 9]
        assert len(partition.train) == 5


def test_positions_may_be_vectors_nested_or_flat():
    nested = [[[1, 2], [3, 4]], [[5, 6]]]
    want = [[[1, 2], [3, 4]], [[5, 6], [9, 9]]]
    spec = make_spec((None, 2), value=9)
    for rows, kind in (
        (nested, pa.list_(pa.list_(pa.float64()))),
        (nested, pa.list_(pa.list_(pa.float32(), 2))),
        ([[1, 2, 3, 4], [5, 6]], pa.list_(pa.float32())),
    ):
        batch = make_table(rows, kind).to_batches()[0]
        np.testing.assert_array_equal(decode(batch, spec).x["x"], want)


def test_a_mask_says_what_is_no_padding():
    mask = ColumnSpec(("x",), (None,), "bool", "mask", padding=ZERO)
    spec = DataSpec({"x": make_spec().features["x"], "x_mask": mask})
    batch = decode(make_table([[1, 0], [], [0]]).to_batches()[0], spec)
    assert batch.x["x"].tolist() == [[1, 0], [0, 0], [0, 0]]
    assert batch.x["x_mask"].tolist() == [[True, True], [False, False], [True, False]]
    pairs = ColumnSpec(("x",), (None,), "bool", "mask", padding=Padding(numbers=2))
    batch = decode(make_table([[1, 0], [], [0, 1, 2, 3]]).to_batches()[0], DataSpec({"m": pairs}))
    assert batch.x["m"].tolist() == [[True, False], [False, False], [True, True]]


def test_few_lengths_are_powers_of_two():
    assert [Padding(few_lengths=True).length(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [
        1, 1, 2, 4, 4, 8, 64, 128,
    ]  # fmt: skip


def test_texts_in_memory_and_on_disk():
    texts = ["a", "", "größer", "x\x00", "long " * 30]
    spec = DataSpec({"t": ColumnSpec(("t",), (1,), "string", "text")})
    views = [pa.string_view()] if hasattr(pa, "string_view") else []  # pyarrow 16 and newer
    for kind in (pa.string(), pa.large_string(), *views):
        batch = pa.RecordBatch.from_pydict({"t": pa.array(["?", *texts], kind)}).slice(1)
        found = decode(batch, spec).x["t"]
        assert found.shape == (5, 1)
        assert [t.decode() for t in found[:, 0]] == texts
    for budget in (1 << 30, 10):
        batches = pa.table({"t": texts}).to_batches(max_chunksize=2)
        with read_partition(batches, spec, budget) as partition:
            taken = partition.train.take([4, 2, 2]).x["t"]
        assert [t.decode() for t in taken[:, 0]] == [texts[4], texts[2], texts[2]]


def test_no_rows_at_all():
    with read_partition(iter(()), make_spec()) as partition:
        assert not list(Batches(partition.train, 4).stacks(0, 2))
        assert partition.train.take([]).x["x"].shape == (0, 1)


@pytest.mark.parametrize(
    ("rows", "kind", "spec", "message"),
    [
        ([[1], [2, None]], pa.list_(pa.int32()), make_spec(), "row 1 of .*no nulls inside"),
        ([[1], [], [2.5]], pa.list_(pa.float64()), make_spec(dtype="int32"), "row 2 .*int32"),
        ([[1, 2], [3]], pa.list_(pa.int32()), make_spec((None, 2)), "row 1 .*does not fit"),
        ([[[1], [2, 3]]], pa.list_(pa.list_(pa.int32())), make_spec(), "unequal length"),
        (["a"], pa.string(), make_spec(), "holds no arrays"),
    ],
)
def test_what_cannot_be_padded(rows, kind, spec, message):
    with pytest.raises(DataError, match=message):
        decode(make_table(rows, kind).to_batches()[0], spec)


def test_specs_that_contradict_themselves():
    with pytest.raises(ConfigError, match="first dimension is free"):
        ColumnSpec(("x",), (3,), padding=ZERO)
    with pytest.raises(ConfigError, match="one text per row"):
        ColumnSpec(("x",), (2,), "string", "text")


def test_check_finite_finds_the_row():
    with (
        read_partition(
            make_table([[1.0], [2.0, np.nan]], pa.list_(pa.float64())).to_batches(), make_spec()
        ) as partition,
        pytest.raises(DataError, match="row 1 of"),
    ):
        partition.check_finite()


def test_taking_rows_of_a_ragged_column():
    column = Ragged(np.arange(6), np.array([2, 0, 3, 1]))
    taken = column.take(np.array([3, 2, 1, 2]))
    assert taken.values.tolist() == [5, 2, 3, 4, 2, 3, 4]
    assert taken.lengths.tolist() == [1, 3, 0, 3]
