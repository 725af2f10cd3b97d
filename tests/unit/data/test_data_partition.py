"""read_partition: roles, budget and spilling; NumPy on the driver."""

from __future__ import annotations

import os
import resource
import signal

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import (
    Batches,
    ColumnSpec,
    DataSpec,
    decode,
    read_partition,
    rows_from_numpy,
    to_arrow_table,
)
from sparkdl.data.partition import _Collector
from sparkdl.errors import DataError, ResourceError

SPEC = DataSpec(
    {"x": ColumnSpec(("f",), (3, 2))},
    {"y": ColumnSpec(("l",), (7,), kind="scalars", one_hot=7)},
    ColumnSpec(("w",), (), "float64", "scalars"),
    role_column="role",
)


def make_table(num_rows, seed=0):
    random = np.random.default_rng(seed)
    return pa.table(
        {
            "f": pa.array(random.normal(size=(num_rows, 6)).tolist(), pa.list_(pa.float64())),
            "l": pa.array(random.integers(0, 7, num_rows), pa.int64()),
            "w": random.random(num_rows),
            "role": pa.array((random.random(num_rows) < 0.3).astype(np.int8)),
        }
    )


def read(table, chunk=100, **options):
    return read_partition(iter(table.to_batches(max_chunksize=chunk)), SPEC, **options)


def content(rows):
    batch = rows.take(np.arange(len(rows)))
    return batch.x["x"], batch.y["y"], batch.sample_weight["y"]


@pytest.mark.parametrize("budget", [1 << 30, 6000, 1])
@pytest.mark.parametrize("num_rows", [0, 1, 99, 100, 1234])
def test_every_row_arrives_in_its_role(num_rows, budget, tmp_path):
    table = make_table(num_rows)
    roles = table["role"].to_numpy()
    whole = table.combine_chunks().to_batches()
    with read(table, memory_budget_bytes=budget, spill_dir=str(tmp_path)) as partition:
        assert partition.num_rows == num_rows
        if budget == 1 and num_rows > 1:
            assert partition.train.storage.block_rows is not None
        assert list(tmp_path.iterdir()) == []
        partition.check_finite()
        for role, rows in ((0, partition.train), (1, partition.validation)):
            assert len(rows) == rows.num_rows == (roles == role).sum()
            if num_rows:
                want = decode(whole[0], SPEC)
                wanted = (want.x["x"], want.y["y"], want.sample_weight["y"])
                for got, all_rows in zip(content(rows), wanted, strict=True):
                    np.testing.assert_array_equal(got, all_rows[roles == role])
                    assert got.dtype == all_rows.dtype
                for start in range(0, len(rows), 77):
                    part = rows.slice(start, start + 77).x["x"]
                    np.testing.assert_array_equal(part, want.x["x"][roles == role][start:][:77])


def test_empty_batches_between_full_ones_and_no_batches():
    table = make_table(10)
    batches = [table.slice(0, 0), table.slice(0, 4), table.slice(4, 0), table.slice(4, 6)]
    parts = [b.combine_chunks().to_batches() or [_empty(table)] for b in batches]
    partition = read_partition(iter([p[0] for p in parts]), SPEC)
    assert partition.num_rows == 10
    nothing = read_partition(iter([]), SPEC)
    assert nothing.num_rows == 0
    assert nothing.train.take([]).x["x"].shape == (0, 3, 2)
    assert nothing.train.slice(0, 5).y["y"].shape == (0, 7)
    nothing.check_finite()


def _empty(table):
    return pa.RecordBatch.from_pylist([], schema=table.schema)


def test_a_spilled_file_has_no_name_and_is_let_go(tmp_path):
    def open_files():
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        with open("/proc/self/maps") as maps:
            mapped = [line for line in maps if str(tmp_path) in line]
        return [os.readlink(x) for x in links if os.path.islink(x)], mapped

    partition = read(make_table(1000), memory_budget_bytes=1, spill_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    files, mapped = open_files()
    assert mapped
    held = partition.train.slice(0, 1).x["x"].copy()
    partition.close()
    partition.close()
    files, mapped = open_files()
    assert not mapped
    assert not [name for name in files if str(tmp_path) in name]
    assert held.shape == (1, 3, 2)
    with pytest.raises(DataError, match="closed"):
        partition.train.take([0])


def test_a_reader_that_raises_leaves_no_file_open(tmp_path):
    table = make_table(500)

    def batches():
        yield from table.to_batches(max_chunksize=100)
        raise OSError("the shuffle is gone")

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="the shuffle is gone"):
        read_partition(batches(), SPEC, 1, str(tmp_path))
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_full_disk_is_one_clear_error(tmp_path):
    table = make_table(3000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ResourceError, match="memory budget") as info:
            read(table, memory_budget_bytes=1000, spill_dir=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert str(tmp_path) in str(info.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_spill_directory_is_one_clear_error(tmp_path):
    with pytest.raises(ResourceError, match="spill"):
        read(make_table(100), memory_budget_bytes=1, spill_dir=str(tmp_path / "none"))


@pytest.mark.parametrize("budget", [1 << 30, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_check_finite_names_column_and_row(bad, budget):
    values = np.zeros((50, 6))
    values[17, 4] = values[30, 0] = bad
    table = make_table(50).set_column(0, "f", pa.array(values.tolist()))
    table = table.set_column(3, "role", pa.array([0] * 50, pa.int8()))
    partition = read(table, chunk=20, memory_budget_bytes=budget)
    with pytest.raises(DataError, match="row 17") as info:
        partition.check_finite()
    assert "'f'" in str(info.value)
    assert "(2, 0)" in str(info.value)


def test_unknown_roles_and_free_shapes_that_differ():
    table = make_table(10).set_column(3, "role", pa.array([0] * 9 + [2], pa.int8()))
    with pytest.raises(DataError, match=r"row 9.*unknown role"):
        read(table, chunk=4)
    null = table.set_column(3, "role", pa.array([1] * 9 + [-1], pa.int8()))
    with pytest.raises(DataError, match=r"row 9(.|\n)*received: null in the boolean column"):
        read(null, chunk=4)
    spec = DataSpec({"x": ColumnSpec(("f",), (None,))})
    batches = [
        pa.RecordBatch.from_pydict({"f": [[1.0, 2.0]]}),
        pa.RecordBatch.from_pydict({"f": [[1.0]]}),
    ]
    with pytest.raises(DataError, match=r"from row 1 .*\n.*\(2,\).*\n.*\(1,\)"):
        read_partition(iter(batches), spec)


def test_row_numbers_count_over_batches():
    table = make_table(10).set_column(1, "l", pa.array([0] * 8 + [9, 0], pa.int64()))
    with pytest.raises(DataError, match="row 8 of the partition"):
        read(table, chunk=3)


def test_narrow_values_stay_narrow_until_the_batch():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 4), np.uint8)
    table = pa.table({"f": [p.tobytes() for p in pixels]})
    spec = DataSpec({"x": ColumnSpec(("f",), (2, 2), kind="binary", source_dtype="uint8")})
    rows = read_partition(iter(table.to_batches()), spec).train
    assert rows.storage.slice(0, 0, 20).dtype == np.uint8
    got = rows.take(np.arange(20)).x["x"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, pixels.reshape(20, 2, 2))


def test_numpy_rows_are_not_copied():
    x, y = np.random.rand(10, 3).astype("float32"), np.arange(10)
    rows = rows_from_numpy(x, y)
    assert np.shares_memory(rows.slice(2, 5).x["features"], x)
    assert rows.take([9, 0]).y["label"].tolist() == [9, 0]
    assert rows_from_numpy(x.astype("float64")).take([0]).x["features"].dtype == np.float32
    assert rows_from_numpy(x[::2, ::-1]).take([1]).x["features"].tolist() == [x[2, ::-1].tolist()]


def test_numpy_rows_follow_the_spec_of_the_model():
    spec = DataSpec(
        {"in": ColumnSpec(("any",), (2, 2))}, {"out": ColumnSpec(("any",), (3,), one_hot=3)}
    )
    batch = rows_from_numpy(np.ones((4, 4)), [0, 1, 2, 0], spec=spec).take([2])
    assert batch.x["in"].shape == (1, 2, 2)
    assert batch.y["out"].tolist() == [[0, 0, 1]]
    for x, y, word in (
        (np.ones((4, 4)), [0, 1, 2, 3], "label"),
        (np.ones((4, 5)), [0, 1, 2, 0], "shape"),
        (np.ones((3, 4)), [0, 1, 2, 0], "unequal"),
        ({"other": np.ones((4, 4))}, [0, 1, 2, 0], "other"),
        (np.array([["a"]]), [0], "numbers"),
    ):
        with pytest.raises(DataError, match=word):
            rows_from_numpy(x, y, spec=spec)


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "uint8", "int64", "bool", "float16", ">i4"]
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
def test_an_arrow_table_reads_back_as_it_was(dtype, shape):
    random = np.random.default_rng(0)
    x = {"a": random.integers(0, 2, (9, *shape)).astype(dtype), "b": random.random((9, 2))}
    y, w = random.integers(0, 4, 9), random.random(9)
    table, spec = to_arrow_table(x, y, w)
    assert table.schema.names == ["features_0", "features_1", "label", "sample_weight"]
    rows = read_partition(iter(table.to_batches(max_chunksize=4)), spec).train
    direct = rows_from_numpy(x, y, w).take(np.arange(9))
    got = rows.take(np.arange(9))
    for a, b in ((got.x, direct.x), (got.y, direct.y), (got.sample_weight, direct.sample_weight)):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
            assert a[name].dtype == b[name].dtype
    np.testing.assert_array_equal(got.x["a"], x["a"])


def test_an_arrow_table_keeps_one_hot_labels_as_integers():
    spec = DataSpec({"in": ColumnSpec("a", (4,))}, {"out": ColumnSpec("b", (5,), one_hot=5)})
    table, found = to_arrow_table(np.ones((3, 4)), [4, 0, 1], spec=spec)
    assert table.schema.field("label").type == pa.int32()
    rows = read_partition(iter(table.to_batches()), found).train
    assert rows.take([0]).y["out"].tolist() == [[0, 0, 0, 0, 1]]
    empty, found = to_arrow_table(np.ones((0, 4)), np.zeros(0, int), spec=spec)
    assert empty.num_rows == 0
    assert read_partition(iter(empty.to_batches()), found).num_rows == 0


def test_spilled_rows_are_read_in_blocks_within_the_budget():
    x = np.arange(3984, dtype=np.float32).reshape(996, 4)
    table, spec = to_arrow_table(x)
    rows = read_partition(iter(table.to_batches(max_chunksize=90)), spec, 3200).train
    storage = rows.storage
    assert storage.block_rows * 16 * storage.group_blocks * 3 <= 3200
    order = [w.x["features"][0, :, 0] for w in Batches(rows, 10, seed=1).stacks(0, 1)]
    flat = np.concatenate(order) / 4
    assert sorted(flat) == list(range(996))
    group = storage.block_rows * storage.group_blocks
    assert 996 % storage.block_rows == 0
    for start in range(0, 996, group):
        touched = np.unique(flat[start : start + group] // storage.block_rows)
        assert len(touched) <= storage.group_blocks


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux' /proc")
@pytest.mark.parametrize("shuffle", [False, True])
def test_reading_spilled_rows_keeps_to_the_budget(shuffle, tmp_path):
    def mapped_bytes():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")

    def batches():
        for i in range(40):
            yield pa.RecordBatch.from_pydict(
                {"f": [np.full(1 << 10, i, np.uint8).tobytes()] * 1024}
            )

    spec = DataSpec({"x": ColumnSpec(("f",), (1 << 10,), "uint8", "binary")})
    rows = read_partition(batches(), spec, 8 << 20, str(tmp_path)).train
    before, most = mapped_bytes(), 0
    for stack in Batches(rows, 60, shuffle=shuffle, prefetch=0).stacks(0, 16):
        assert stack.x["x"].min() >= 0
        most = max(most, mapped_bytes() - before)
    assert most < 16 << 20
    rows.close()


def test_of_a_large_record_batch_a_few_rows_are_decoded_at_a_time(monkeypatch, tmp_path):
    """Ten thousand images of one Arrow batch would be gigabytes, whatever the budget is."""
    monkeypatch.setattr("sparkdl.data.partition._DECODED_BYTES", 5 * 100 * 4)

    def decoder(value):
        return np.full(100, value[0], np.float32)

    spec = DataSpec({"x": ColumnSpec(("c",), (100,), kind="decoded", decoder=decoder)})
    collected = []
    real = _Collector.append

    def append(self, arrays, indices, first_row):
        collected.append(len(arrays[0]))
        real(self, arrays, indices, first_row)

    monkeypatch.setattr(_Collector, "append", append)
    batch = pa.RecordBatch.from_pydict(
        {"c": pa.array([bytes([i]) for i in range(12)], pa.binary())}
    )
    with read_partition([batch], spec, 800, str(tmp_path)) as partition:
        assert partition.train.take(np.arange(12)).x["x"][:, 0].tolist() == list(range(12))
    assert collected == [5, 5, 2]
