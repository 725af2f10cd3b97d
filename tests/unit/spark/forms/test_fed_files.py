"""Parquet and Arrow files that ranks read in equal ranges of rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T

from sparkdl.data.feed import to_numpy
from sparkdl.data.plain_arrow import FileColumns
from sparkdl.errors import DataError
from sparkdl.files.listing import find_files
from sparkdl.spark.forms import arrow_files as file_forms
from sparkdl.spark.forms.arrow_files import arrow_facts, parquet_facts, read_arrow
from sparkdl.spark.forms.fed_files import FileRows, fed_files


def written(folder: Path, sizes: list[list[int]]) -> tuple[str, int]:
    """Files with row groups of these sizes, whose rows count from 0."""
    at = 0
    for number, groups in enumerate(sizes):
        schema = pa.schema({"n": pa.int32(), "x": pa.list_(pa.float32())})
        with pq.ParquetWriter(folder / f"part-{number}.parquet", schema) as writer:
            for rows in groups:
                values = list(range(at, at + rows))
                table = pa.table({"n": values, "x": [[v, v + 0.5] for v in values]}, schema)
                writer.write_table(table, row_group_size=max(1, rows))
                at += rows
    return f"{folder}/*.parquet", at


def rows_of(path: str, ranks: int) -> FileRows:
    files = tuple((file, parquet_facts(file.path)[1]) for file in find_files(path))
    return FileRows(files, pa.schema({"x": pa.list_(pa.float32()), "n": pa.int64()}), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("sizes", [[[31]], [[5, 0, 7], [1]], [[1] * 9, [11, 2], [3]]])
def test_each_row_goes_to_one_rank_and_shares_differ_by_one(
    tmp_path: Path, sizes: list[list[int]], ranks: int
) -> None:
    path, total = written(tmp_path, sizes)
    rows = rows_of(path, ranks)
    shares = []
    for rank in range(ranks):
        batches = list(rows.batches(rank))
        assert all(batch.schema == rows.schema for batch in batches)
        shares.append([row for batch in batches for row in batch.to_pylist()])
    assert [row for share in shares for row in share] == [
        {"x": [n, n + 0.5], "n": n} for n in range(total)
    ]
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("readers", [1, 2, 4, 9, None])
def test_a_rank_gets_the_same_rows_from_any_number_of_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int | None
) -> None:
    monkeypatch.setattr(file_forms, "_BLOCK_BYTES", 300)  # some row groups together
    path, total = written(tmp_path, [[1] * 9, [11, 0, 2], [0], [3, 30, 4]])
    rows = rows_of(path, 2)
    batches = [batch for rank in (0, 1) for batch in rows.batches(rank, readers)]
    assert [n for batch in batches for n in batch.column("n").to_pylist()] == list(range(total))
    assert all(batch.num_rows for batch in batches)


@pytest.mark.parametrize("left", [[7], [5, 2], [4], []])
@pytest.mark.parametrize("before", [[10], [5, 5]])
def test_a_file_that_has_lost_rows_is_named(
    tmp_path: Path, left: list[int], before: list[int]
) -> None:
    path, _ = written(tmp_path, [before])
    rows = rows_of(path, 2)
    written(tmp_path, [left])
    with pytest.raises(DataError, match=r"part-0\.parquet has lost rows"):
        list(rows.batches(1))
    if sum(left) >= 5:
        assert sum(batch.num_rows for batch in rows.batches(0)) == 5


def arrow(folder: Path, sizes: list[list[int]], codec: str | None) -> str:
    """The same rows as :func:`written`, with lists of a fixed size."""
    at = 0
    schema = pa.schema({"n": pa.int64(), "x": pa.list_(pa.float32(), 2)})
    options = pa.ipc.IpcWriteOptions(compression=codec)
    for number, groups in enumerate(sizes):
        with pa.ipc.new_file(f"{folder}/part-{number}.arrow", schema, options=options) as writer:
            for rows in groups:
                values = list(range(at, at + rows))
                writer.write_batch(
                    pa.record_batch([values, [[v, v + 0.5] for v in values]], schema=schema)
                )
                at += rows
    return f"{folder}/*.arrow"


@pytest.mark.parametrize("codec", [None, "lz4"])
@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_arrow_files_are_shared_by_rows(tmp_path: Path, ranks: int, codec: str | None) -> None:
    path = arrow(tmp_path, [[31, 0, 4], [5]], codec)
    files = tuple((file, arrow_facts(file.path)[1]) for file in find_files(path))
    assert [groups for _, groups in files] == [(31, 0, 4), (5,)]
    wanted = pa.schema({"x": pa.list_(pa.float32()), "n": pa.int64()})
    rows = FileRows(files, wanted, ranks, "arrow")
    shares = [[row for b in rows.batches(rank) for row in b.to_pylist()] for rank in range(ranks)]
    assert [len(share) for share in shares] == [rows.num_rows(rank) for rank in range(ranks)]
    assert [row for share in shares for row in share] == [
        {"x": [n, n + 0.5], "n": n} for n in range(40)
    ]


def test_rows_of_an_arrow_file_are_views_of_it(tmp_path: Path) -> None:
    path = arrow(tmp_path, [[100_000]], None).replace("*", "part-0")
    before = pa.total_allocated_bytes()
    batches = list(read_arrow(path, None, FileColumns(["x"])))
    assert pa.total_allocated_bytes() - before < 100_000
    assert to_numpy(batches[0].column(0))[-1].tolist() == [99_999, 99_999.5]  # the file is closed


def test_what_is_no_arrow_file_is_named(tmp_path: Path) -> None:
    path = arrow(tmp_path, [[3]], None).replace("*", "part-0")
    with pytest.raises(DataError, match="'y'"):
        list(read_arrow(path, None, FileColumns(["y"])))
    Path(path).write_bytes(b"ARROW1 and no more")
    with pytest.raises(DataError, match=r"part-0\.arrow cannot be read"):
        arrow_facts(path)
    with pytest.raises(DataError, match=r"part-0\.arrow cannot be read"):
        list(read_arrow(path, None, FileColumns(["x"])))


def test_of_a_file_system_that_python_does_not_know_spark_reads() -> None:
    frame = SimpleNamespace(schema=T.StructType([T.StructField("n", T.LongType())]))
    with pytest.warns(RuntimeWarning, match="ranks cannot read the files by themselves"):
        assert fed_files("viewfs://table/rows.parquet", frame, ("n",), 2) is None


@pytest.mark.skipif(not hasattr(pa, "fixed_shape_tensor"), reason="an older pyarrow")
def test_a_permuted_tensor_has_its_logical_order(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 2), permutation=[1, 0])
    stored = pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float32(), 4))
    table = pa.table({"x": pa.ExtensionArray.from_storage(kind, stored), "n": [7]})
    pq.write_table(table, tmp_path / "a.parquet")
    (batch,) = rows_of(str(tmp_path), 1).batches(0)
    assert batch.to_pylist() == [{"x": [1.0, 3.0, 2.0, 4.0], "n": 7}]
