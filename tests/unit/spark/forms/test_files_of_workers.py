"""Files that workers read by themselves: every row once, roles, folders, broken files."""

from __future__ import annotations

import dataclasses
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow import feather

from sparkdl.data import Batches, ColumnSpec, DataSpec, read_partition
from sparkdl.data.plain_arrow import FileColumns
from sparkdl.data.shards import deal
from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.errors import ConfigError, DataError, ResourceError
from sparkdl.files.listing import find_files
from sparkdl.spark.forms import arrow_files as file_forms
from sparkdl.spark.forms.files import FileInput, FileSet, _as_spark, kind_of_path
from sparkdl.spark.forms.wire import ONES

SPEC = DataSpec(
    {"x": ColumnSpec(("features",), (4,))},
    {"y": ColumnSpec(("label",), (), "int64", "scalars", classes=1000)},
)


class FarFiles(LocalFileSystem):
    """Files of this machine, of which it seems that they are not."""

    protocol = "far"


def rows(first: int, count: int) -> pa.RecordBatch:
    labels = np.arange(first, first + count)
    values = np.repeat(labels[:, None], 4, 1).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 4)
    return pa.RecordBatch.from_pydict(
        {"extra": pa.array(["x"] * count), "label": pa.array(labels),
         "features": column.cast(pa.list_(pa.float32()))}
    )  # fmt: skip


def write(folder: Path, kind: str, counts: list[int]) -> FileSet:
    first, schema = 0, pa.schema([])
    for number, count in enumerate(counts):
        batch = rows(first, count)
        path = folder / f"part-{number}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_batches([batch]), path, row_group_size=10)
        elif kind == "arrow":
            feather.write_feather(pa.Table.from_batches([batch]), str(path), chunksize=10)
        else:
            path.write_bytes(encode_batch(batch, "Example"))
            schema = batch.schema
        first += count
    assert kind_of_path(str(folder)) == kind
    return FileSet(kind, tuple(find_files(f"{folder}/*.{kind}")), schema)  # type: ignore[arg-type]


def labels_of(files: FileInput, rank: int, spec: DataSpec = SPEC) -> list[int]:
    return [label for b in files.batches(rank, spec) for label in b.column("label").to_pylist()]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tfrecord"])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_every_row_goes_to_one_worker(tmp_path: Path, kind: str, workers: int) -> None:
    files = FileInput.dealt([write(tmp_path, kind, [35, 3, 80, 0, 40])], workers, 0.0, 0)
    found = [labels_of(files, rank) for rank in range(workers)]
    assert sorted(chain.from_iterable(found)) == list(range(158))
    if kind != "tfrecord" and workers < 7:
        assert max(map(len, found)) - min(map(len, found)) <= 20


READERS = [1, 2, 4, 9, None]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row group is read by itself, row by row."""
    monkeypatch.setattr(file_forms, "_BLOCK_BYTES", 1)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tfrecord"])
def test_rows_do_not_depend_on_the_number_of_readers(
    tmp_path: Path, small_pieces: None, kind: str
) -> None:
    spec = dataclasses.replace(SPEC, role_column="role")
    files = write(tmp_path, kind, [35, 3, 80, 0, 40])
    fsspec.register_implementation("far", FarFiles, clobber=True)
    far = dataclasses.replace(
        files, files=tuple(dataclasses.replace(f, path=f"far://{f.path}") for f in files.files)
    )
    for place in (files, far):
        dealt = FileInput.dealt([place], 1, 0.25, 3)
        found = [list(dealt.batches(0, spec, readers)) for readers in READERS]
        assert [n for b in found[0] for n in b.column("label").to_pylist()] == list(range(158))
        assert all(batches == found[0] for batches in found)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tfrecord"])
def test_each_file_draws_numbers_of_its_own_for_the_split(tmp_path: Path, kind: str) -> None:
    spec = dataclasses.replace(SPEC, role_column="role")
    files = FileInput.dealt([write(tmp_path, kind, [64, 64, 64])], 1, 0.5, 3)
    roles = [r for b in files.batches(0, spec) for r in b.column("role").to_pylist()]
    each = {tuple(roles[first : first + 64]) for first in (0, 64, 128)}
    assert len(each) == 3
    assert all(0.25 < np.mean(drawn) < 0.75 for drawn in each)


@pytest.mark.parametrize("budget", [1 << 20, 600])
def test_training_that_goes_on_within_an_epoch_finds_the_same_rows(
    tmp_path: Path, small_pieces: None, budget: int
) -> None:
    files = FileInput.dealt([write(tmp_path, "parquet", [35, 3, 80, 40])], 1, 0.0, 0)

    def labels(readers: int | None, start_batch: int) -> list[list[int]]:
        batches = files.batches(0, SPEC, readers)
        with read_partition(batches, SPEC, budget, str(tmp_path)) as partition:
            stacks = Batches(partition.train, 8, seed=5).stacks(2, 1, start_batch)
            return [stack.y["y"].ravel().tolist() for stack in stacks]

    whole = labels(1, 0)
    assert sorted(chain.from_iterable(whole)) == list(range(158))
    for readers in READERS:
        assert labels(readers, 7) == whole[7:]


@pytest.mark.parametrize("readers", READERS)
def test_a_file_that_breaks_off_is_named_after_the_rows_before(
    tmp_path: Path, small_pieces: None, readers: int | None
) -> None:
    files = write(tmp_path, "parquet", [30, 40, 30])
    path = Path(files.files[1].path)
    with pq.ParquetFile(path) as file:
        begin = file.metadata.row_group(2).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[begin : begin + 200] = b"\xff" * 200
    path.write_bytes(content)
    taken: list[int] = []
    with pytest.raises(DataError, match=r"part-1\.parquet cannot be read") as caught:
        taken.extend(
            label
            for batch in FileInput.dealt([files], 1, 0.0, 0).batches(0, SPEC, readers)
            for label in batch.column("label").to_pylist()
        )
    assert taken == list(range(50))
    assert caught.value.expected == "a sound Parquet file"
    assert [t.name for t in threading.enumerate() if t.name == "sparkdl-reader"] == []


def test_row_groups_that_have_gone_are_missed(tmp_path: Path) -> None:
    dealt = FileInput.dealt([write(tmp_path, "parquet", [35])], 1, 0.0, 0)
    write(tmp_path, "parquet", [12])
    with pytest.raises(DataError, match=r"part-0\.parquet has lost rows(.|\n)*2 row groups"):
        labels_of(dealt, 0)


def test_shards_are_dealt_by_size() -> None:
    sizes = [7, 1, 9, 3, 3, 8, 2, 1, 6]
    hands = deal(list(range(9)), sizes, 3)
    loads = [sum(sizes[i] for i in hand) for hand in hands]
    assert sorted(chain.from_iterable(hands)) == list(range(9))
    assert max(loads) - min(loads) <= 2
    assert deal(["a"], [1], 3) == [["a"], [], []]


def test_roles_do_not_depend_on_the_dealing(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, role_column="role")
    files = write(tmp_path, "tfrecord", [200, 100, 50])
    validated = []
    for workers in (1, 3):
        dealt = FileInput.dealt([files], workers, 0.25, 7)
        held = set()
        for rank in range(workers):
            for batch in dealt.batches(rank, spec):
                table = pa.Table.from_batches([batch]).to_pydict()
                held |= {n for n, r in zip(table["label"], table["role"], strict=True) if r}
        validated.append(held)
    assert validated[0] == validated[1]
    assert 50 < len(validated[0]) < 130
    other = FileSet("tfrecord", files.files[:1], files.schema, role=1)
    dealt = FileInput.dealt([files, other], 2, 0.0, 0)
    roles = [b.column("role").to_pylist() for rank in (0, 1) for b in dealt.batches(rank, spec)]
    assert sorted(chain.from_iterable(roles)) == [0] * 350 + [1] * 200


def test_folders_and_weights_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "label=7"
    folder.mkdir()
    batch = rows(0, 5).select(["features"])
    pq.write_table(pa.Table.from_batches([batch]), folder / "a.parquet")
    files = FileSet("parquet", tuple(find_files(str(tmp_path))), rows(0, 1).schema)
    spec = DataSpec(SPEC.features, SPEC.labels, ColumnSpec((ONES,), (), kind="scalars"))
    batch = next(FileInput.dealt([files], 1, 0.0, 0).batches(0, spec))
    assert batch.column("label").to_pylist() == [7] * 5
    assert batch.column(ONES).to_pylist() == [1.0] * 5
    folder.rename(tmp_path / "label=__HIVE_DEFAULT_PARTITION__")  # Spark's folder for nulls
    files = FileSet("parquet", tuple(find_files(f"file://{tmp_path}")), rows(0, 1).schema)
    batch = next(FileInput.dealt([files], 1, 0.0, 0).batches(0, spec))
    assert batch.column("label").to_pylist() == [None] * 5
    with pytest.raises(ResourceError, match="names the machine"):
        find_files("file://elsewhere/a.parquet")


def test_more_rows_than_the_budget_are_spilled_in_blocks(tmp_path: Path) -> None:
    files = FileInput.dealt([write(tmp_path, "parquet", [900])], 1, 0.0, 0)
    with read_partition(files.batches(0, SPEC), SPEC, 2000, str(tmp_path)) as partition:
        assert partition.train.storage.block_rows is not None
        batch = partition.train.take(np.arange(900))
        assert batch.y["y"].tolist() == list(range(900))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = write(tmp_path, "parquet", [20])
    Path(files.files[0].path).write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"part-0\.parquet cannot be read"):
        FileInput.dealt([files], 1, 0.0, 0)
    with pytest.raises(ResourceError, match="no files at"):
        find_files(str(tmp_path / "*.orc"))
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ConfigError, match="cannot be seen what the files"):
        kind_of_path(str(tmp_path / "a.csv"))
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"label": [1]}), other / "b.parquet")
    wrong = FileSet("parquet", tuple(find_files(str(other))), pa.schema([]))
    with pytest.raises(DataError, match="'features'"):
        labels_of(FileInput.dealt([wrong], 1, 0.0, 0), 0)


def test_the_kind_of_files_is_not_told_by_a_folder_above_them(tmp_path: Path) -> None:
    """Nor only by a name: a name like those of Hive says nothing."""
    table = pa.table({"label": [1]})
    top = tmp_path / "from.parquet_then.tfrecord"
    for folder in ("hive", "other", "arrow"):
        (top / folder).mkdir(parents=True)
    pq.write_table(table, top / "hive" / "000000_0")
    feather.write_feather(table, str(top / "arrow" / "part"))
    feather.write_feather(table, str(top / "other" / "a.feather"))
    for folder, kind in (("hive", "parquet"), ("arrow", "arrow"), ("other", "arrow")):
        for path in (top / folder, top / folder / "*", top / folder / "[^x]*"):
            assert kind_of_path(str(path)) == kind


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_duration_keeps_its_length_whatever_its_unit(tmp_path: Path, unit: str) -> None:
    """Spark has microseconds."""
    found = pa.array([1], pa.duration("s")).cast(pa.duration(unit))
    feather.write_feather(pa.table({"t": found}), f"{tmp_path}/a.arrow")
    (batch,) = file_forms.read_arrow(f"{tmp_path}/a.arrow", None, FileColumns(["t"]))
    passed = _as_spark("a.arrow", batch.column("t"), pa.field("t", pa.duration("us")))
    assert passed.cast(pa.int64()).to_pylist() == [1_000_000]


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_file_of_many_record_batches_is_opened_once_by_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, codec: str | None
) -> None:
    """A stream is read from its begin each time, so one of n batches took n * n."""
    path = str(tmp_path / "a.arrow")
    batches = [rows(10 * n, 10) for n in range(50)]
    with make(path, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    opened: list[Any] = []
    read = file_forms._reader
    monkeypatch.setattr(file_forms, "_reader", lambda *a: opened.append(a) or read(*a))
    held_out = FileSet("arrow", tuple(find_files(path)), batches[0].schema, role=1)
    files = FileInput.dealt([dataclasses.replace(held_out, role=0), held_out], 2, 0.0, 0)
    spec = dataclasses.replace(SPEC, role_column="role")
    found = [b for rank in (0, 1) for b in files.batches(rank, spec)]
    for role in (0, 1):
        labels = [b["label"].to_pylist() for b in found if b["role"][0].as_py() == role]
        assert sorted(chain.from_iterable(labels)) == list(range(500))
    assert len(opened) < 40


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_of_which_only_folders_are_used_are_there(tmp_path: Path, kind: str) -> None:
    (tmp_path / "k=7").mkdir()
    write(tmp_path / "k=7", kind, [35])
    spec = DataSpec({"x": ColumnSpec(("k",), (1,), kind="scalars")})
    schema = pa.schema({"k": pa.int64()})
    files = FileInput.dealt([FileSet(kind, tuple(find_files(str(tmp_path))), schema)], 2, 0.0, 0)  # type: ignore[arg-type]
    found = [b.column("k").to_pylist() for rank in (0, 1) for b in files.batches(rank, spec)]
    assert list(chain.from_iterable(found)) == [7] * 35
