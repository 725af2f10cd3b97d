"""The same rows from files of every writer, by path and through Spark.

The workers' rows are read as in a fit, without one; some fits, evaluations and predictions at the
end are real, beside plain Keras on the rows. ``bash tests/writers.sh`` runs this on files that
DuckDB, fastparquet, datasets and delta-rs write now; those in ``written/`` are older ones.
"""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather
from trained_rows import PAIRS, SIGNATURES, N, V, linear, trained, wanted

import sparkdl
from sparkdl import SparkModel
from sparkdl.data.decode import decode
from sparkdl.errors import ConfigError, DataError, ResourceError
from sparkdl.spark.forms.fed_files import fed_files
from sparkdl.spark.forms.files import FileInput
from sparkdl.spark.forms.opening import RowChoice, form_of, open_fit_source
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.session.versions import spark_version, table_of_frame

ROOT = Path(__file__).parents[3]
WRITTEN = Path(os.environ.get("SPARKDL_WRITTEN", Path(__file__).parent / "written"))


EXACT = [decimal.Decimal(25 * v).scaleb(-2) for v in V]


def polars_frame() -> pl.DataFrame:
    """All kinds of columns of polars; those of ``write_samples.py`` have their names."""
    return pl.DataFrame(
        {
            "id": pl.Series(V), "u8": pl.Series(V, dtype=pl.UInt8),
            "u64": pl.Series(V, dtype=pl.UInt64),
            "f32": pl.Series([v + 0.5 for v in V], dtype=pl.Float32),
            "x": pl.Series([[v, v + 1.0] for v in V], dtype=pl.List(pl.Float32)),
            "fixed": pl.Series([[v, v + 1.0] for v in V], dtype=pl.Array(pl.Float32, 2)),
            "exact": pl.Series(EXACT, dtype=pl.Decimal(10, 2)),
            "flag": pl.Series([v % 2 == 0 for v in V]),
            "bytes": pl.Series([np.float32([v, v + 1]).tobytes() for v in V]),
            "name": pl.Series([f"s{v}" for v in V]),
            "category": pl.Series(["a", "b"] * 3, dtype=pl.Categorical),
            "nanos": pl.Series(V, dtype=pl.Int64).cast(pl.Datetime("us")).cast(pl.Datetime("ns")),
            "clock": pl.Series([datetime.time(1, 2, v) for v in V]),
            "span": pl.Series([datetime.timedelta(seconds=v) for v in V]),
            "nothing": pl.Series([None] * N), "parts": pl.Series([{"a": v} for v in V]),
        }
    )  # fmt: skip


def arrow_table() -> pa.Table:
    return pa.table({"id": V, "x": pa.array([[v, v + 1.0] for v in V], pa.list_(pa.float32()))})


def write_stream(folder: Path) -> str:
    with pa.ipc.new_stream(f"{folder}/s.arrow", arrow_table().schema) as writer:
        writer.write_table(arrow_table(), 2)
    return f"{folder}/s.arrow"


def write_spark(spark: Any, folder: Path) -> str:
    rows = [(v, [float(v), v + 1.0], v % 2, v + 0.5, EXACT[v]) for v in V]
    frame = spark.createDataFrame(
        rows, "id bigint, x array<float>, part int, f32 float, exact decimal(10,2)"
    )
    frame.repartition(2).write.partitionBy("part").parquet(f"{folder}/spark.parquet")
    (folder / "spark.parquet" / "._SUCCESS.crc").touch()
    return f"{folder}/spark.parquet"


def write_tensorflow(folder: Path) -> str:
    tf = pytest.importorskip("tensorflow")
    kinds = tf.train

    def example(v: int) -> bytes:
        values = {
            "id": kinds.Feature(int64_list=kinds.Int64List(value=[v])),
            "x": kinds.Feature(float_list=kinds.FloatList(value=[v, v + 1])),
            "image": kinds.Feature(bytes_list=kinds.BytesList(value=[b"\xff\xd8" + bytes([v])])),
        }
        values["bytes"] = kinds.Feature(
            bytes_list=kinds.BytesList(value=[np.float32([v, v + 1]).tobytes()])
        )
        features = kinds.Features(feature=values)
        return bytes(kinds.Example(features=features).SerializeToString())

    for part in (0, 1):  # named as TFDS does
        path = f"{folder}/rows-train.tfrecord-0000{part}-of-00002"
        with tf.io.TFRecordWriter(path) as writer:
            for v in V[3 * part : 3 * part + 3]:
                writer.write(example(v))
    (folder / "features.json").write_text("{}")
    return str(folder)


WRITERS: dict[str, Callable[[Any, Path], str]] = {
    "polars parquet": lambda _, f: (
        polars_frame().write_parquet(f / "a.parquet") or f"{f}/*.parquet"
    ),
    "polars ipc": lambda _, f: polars_frame().write_ipc(f / "a.arrow") or f"{f}/a.arrow",
    "pyarrow feather": lambda _, f: (
        feather.write_feather(arrow_table(), f"{f}/a.feather", chunksize=2) or str(f)
    ),
    "pyarrow stream": lambda _, f: write_stream(f),
    "pyarrow brotli": lambda _, f: (
        pq.write_table(arrow_table(), f / "a.pq", compression="brotli") or str(f)
    ),
    "spark": write_spark,
    "tensorflow": lambda _, f: write_tensorflow(f),
    "duckdb": lambda *_: f"{WRITTEN}/duckdb.parquet",
    "duckdb brotli": lambda *_: f"{WRITTEN}/duckdb_brotli.parquet",
    "duckdb parts": lambda *_: f"{WRITTEN}/duckdb_parts",
    "fastparquet": lambda *_: f"{WRITTEN}/fastparquet.parquet",
    "fastparquet lz4": lambda *_: f"{WRITTEN}/fastparquet_lz4.parquet",
    "fastparquet hive": lambda *_: f"{WRITTEN}/fastparquet_hive.parquet",
    "datasets": lambda *_: f"{WRITTEN}/datasets",
}
NUMBERS = ("id", "i8", "u8", "u64", "huge", "f32", "exact", "flag", "kind", "part", *PAIRS)
TEXTS = {("duckdb", "kind")}
"""Columns of these names that hold something else in one writer's file."""


@pytest.mark.parametrize("writer", WRITERS)
def test_each_writers_rows_are_the_same_by_path_and_through_spark(
    spark: Any, tmp_path: Path, writer: str
) -> None:
    path = WRITERS[writer](spark, tmp_path)
    if writer == "polars ipc" and not hasattr(pa, "string_view"):
        with pytest.raises(DataError, match="cannot be read"):  # this pyarrow has no such type
            form_of(path).frame()
        return
    frame = form_of(path).frame()
    assert "id" in frame.columns
    read = [c for c in frame.columns if c in NUMBERS and (writer, c) not in TEXTS]
    rows = table_of_frame(frame.select(*read, *({"name"} & {*frame.columns}))).sort_by("id")
    for column in read:
        np.testing.assert_array_equal(trained(path, column), wanted(column), err_msg=column)
        values = rows[column].to_pylist()
        if column == "bytes":
            values = [np.frombuffer(value, np.float32) for value in values]
        np.testing.assert_array_equal(
            np.array(values, np.float32).reshape(N, -1), wanted(column), err_msg=column
        )
    if "name" in rows.column_names:
        assert rows["name"].to_pylist() == [f"s{v}" for v in V]


def test_columns_beside_those_used_may_be_what_pyarrow_cannot_read(
    spark: Any, tmp_path: Path
) -> None:
    frame = pl.DataFrame({"id": V, "x": arrow_table()["x"].to_pylist(), "huge": V})
    frame.cast({"huge": pl.Int128}).write_parquet(tmp_path / "a.parquet")
    path = f"{tmp_path}/a.parquet"
    with pytest.warns(RuntimeWarning, match="so Spark does"):
        source = open_fit_source(path, RowChoice(SIGNATURES[2], Columns("x", "id"), None, 0.0, 0))
    assert sorted(row.c0 for row in source.frame.collect()) == [[v, v + 1.0] for v in V]
    twice = pa.Table.from_arrays([pa.array(V)] * 4, names=["id", "f32", "no", "no"])
    feather.write_feather(twice, f"{tmp_path}/b.arrow")
    np.testing.assert_array_equal(trained(f"{tmp_path}/b.arrow", "f32").ravel(), V)
    assert form_of(f"{tmp_path}/b.arrow").frame().columns == ["id", "f32"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_relative_path_is_sparks(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also after a change of this process' folder."""
    path = write_two(tmp_path, kind, [WIDE])
    begin = spark._jvm.java.lang.System.getProperty("user.dir")
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(f"{path}/p0.{kind}", begin)
    np.testing.assert_array_equal(trained(relative, "x", width=1).ravel(), [0, 1])
    assert form_of(relative).frame().count() == 2
    with pytest.raises(ResourceError, match="no files"):
        form_of(f"p0.{kind}").frame()


@pytest.mark.parametrize("path", ["none://a/b.parquet", "hdfs://none.invalid:1/b.parquet"])
def test_a_path_that_spark_cannot_reach_is_an_error_of_ours(spark: Any, path: str) -> None:
    with pytest.raises(ResourceError, match="cannot be read"):
        form_of(path).frame()


def test_a_folder_that_is_a_table_of_delta_is_not_read_file_by_file(spark: Any) -> None:
    """Rows 0 and 1 were deleted, and a plain reading has the others twice."""
    path = f"{WRITTEN}/delta"
    assert spark.read.parquet(path).count() == 10
    with pytest.raises(ConfigError, match="'delta'"):
        trained(path, "x")
    with pytest.raises(ConfigError, match="'delta'"):
        SparkModel(linear(2)).predict(path, features="x")


@pytest.mark.parametrize("part", ["*.parquet", "part-0*", "*"])
def test_a_path_into_a_table_of_delta_is_refused(spark: Any, part: str) -> None:
    """Spark reads the deleted rows there, too, unless it has Delta Lake, which refuses as well."""
    path = f"{WRITTEN}/delta/{part}"
    assert spark.read.parquet(f"{WRITTEN}/delta/*.parquet").count() == 10
    model = SparkModel(linear(2), num_workers=1)
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(
            ConfigError, match=f"in '{WRITTEN}/delta' a table of the format 'delta'"
        ):
            call(path, features="x")
    with pytest.raises(ConfigError, match="'delta'"):
        sparkdl.run(lambda: 0, data=path, num_workers=1)


def test_of_a_streams_output_the_files_that_it_tells_are_read(spark: Any, tmp_path: Path) -> None:
    """As by Spark: a file beside them is of a micro-batch that was not taken to its end."""
    pq.write_table(arrow_table(), tmp_path / "in.parquet")
    rows = spark.readStream.schema("id bigint, x array<float>").parquet(f"{tmp_path}/in*")
    out = f"{tmp_path}/out"
    query = rows.writeStream.option("checkpointLocation", f"{tmp_path}/check").start(out)
    query.processAllAvailable()
    query.stop()
    pq.write_table(arrow_table(), f"{out}/left.parquet")
    assert spark.read.parquet(out).count() == N
    source = open_fit_source(out, RowChoice(SIGNATURES[2], Columns("x", "id"), None, 0.0, 0))
    assert not source.files
    assert source.frame.count() == N
    assert fed_files(out, form_of(out).frame(), ("id", "x"), 1) is None


# ------------------------------------------------------------------ files that disagree
def write_two(folder: Path, kind: str, tables: list[dict[str, Any]]) -> str:
    for number, columns in enumerate(tables):
        table = pa.table(columns)
        path = f"{folder}/p{number}.{kind}"
        pq.write_table(table, path) if kind == "parquet" else feather.write_feather(table, path)
    return str(folder)


WIDE = {"id": [0, 1], "x": pa.array([0, 1], pa.int64())}
NARROW = {"x": pa.array([2, 3], pa.int32()), "id": [2, 3]}
DISAGREE: dict[str, tuple[list[dict[str, Any]], list[float] | None]] = {
    "another order and narrower": ([WIDE, NARROW], [0, 1, 2, 3]),
    "wider": ([NARROW, WIDE], None),
    "more columns": ([WIDE, {"z": ["a"], "x": [5], "id": [5]}], [0, 1, 5]),
    "a column in capitals": ([WIDE, {"X": [5], "id": [5]}], [0, 1, 5]),
    "fractions among integers": ([WIDE, {"x": [0.5], "id": [5]}], None),
    "texts": ([WIDE, {"x": ["a"], "id": [5]}], None),
    "no such column": ([WIDE, {"id": [5]}], None),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("case", DISAGREE)
def test_files_that_disagree_are_read_as_spark_does_or_refused(
    spark: Any, tmp_path: Path, case: str, kind: str
) -> None:
    tables, values = DISAGREE[case]
    path = write_two(tmp_path, kind, tables)
    if values is None:
        with pytest.raises(DataError, match=r"p1\..* in another type|has other columns"):
            trained(path, "x", width=1)
        return
    np.testing.assert_array_equal(trained(path, "x", width=1).ravel(), values)
    if spark_version() >= (4, 0) or kind == "arrow":  # Spark 3.5 widens no integers
        rows = form_of(path).frame().select("id", "x").sort("id").collect()
        assert [row.x for row in rows] == values


def test_one_file_that_spark_cannot_decompress_is_read_among_others(
    spark: Any, tmp_path: Path
) -> None:
    pq.write_table(pa.table(WIDE), f"{tmp_path}/a.parquet")
    pq.write_table(pa.table(NARROW), f"{tmp_path}/b.parquet", compression="brotli")
    np.testing.assert_array_equal(trained(str(tmp_path), "x", width=1).ravel(), [0, 1, 2, 3])
    rows = form_of(str(tmp_path)).frame().sort("id").collect()
    assert [row.x for row in rows] == [0, 1, 2, 3]


def test_a_session_may_tell_small_letters_from_capitals(spark: Any, tmp_path: Path) -> None:
    path = write_two(tmp_path, "parquet", DISAGREE["a column in capitals"][0])
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(DataError, match="has other columns"):
            trained(path, "x", width=1)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


# ------------------------------------------------------------------ real calls
@pytest.mark.parametrize(
    "writer",
    ["polars parquet", "duckdb parts", pytest.param("datasets", marks=pytest.mark.slow)],
)
def test_fits_evaluations_and_predictions_are_those_of_keras(
    spark: Any, tmp_path: Path, writer: str
) -> None:
    """A batch holds all rows, so a row that came twice or not at all shows in the weights."""
    path = WRITERS[writer](spark, tmp_path)
    x, y = wanted("x"), wanted("id")
    referee = linear(2)
    referee.fit(x, y, epochs=3, batch_size=N, verbose=0)
    options: dict[str, Any] = {"features": "x", "label": "id"}
    data: list[Any] = [path]
    if writer == "duckdb parts":
        data.append(spark.read.parquet(path))
    for given in data:
        model = SparkModel(linear(2), mode="synchronous", num_workers=1)
        model.fit(given, epochs=3, batch_size=N, verbose=0, **options)
        for ours, theirs in zip(model.model.get_weights(), referee.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert model.evaluate(path, **options)["loss"] == pytest.approx(
        referee.evaluate(x, y, verbose=0), rel=1e-5
    )
    rows = model.predict(path, features="x").sort("id").collect()
    found = np.array([row.prediction for row in rows], np.float32).reshape(N, 1)
    np.testing.assert_allclose(found, referee.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_a_search_reads_what_a_fit_reads(spark: Any, tmp_path: Path) -> None:
    """Also by patterns, beside hidden files and below a folder that Spark passes over."""
    for name in ("a1", "a2", ".a1", "_a1", "old/a1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows = arrow_table().slice(0, 3) if name == "a1" else arrow_table().slice(3)
        pq.write_table(rows, f"{tmp_path}/{name}.parquet")
    referee = linear(2)
    referee.fit(wanted("x"), wanted("id"), epochs=2, batch_size=N, verbose=0)
    options: dict[str, Any] = {"features": "x", "label": "id", "metric": "loss", "verbose": 0}
    for path in (
        f"{WRITTEN}/datasets/*", str(tmp_path), f"{tmp_path}/a[^3]*", f"{WRITTEN}/duckdb_parts",
    ):  # fmt: skip
        study = sparkdl.tune.search(
            lambda trial: linear(2), path, searcher=sparkdl.tune.Single(2), max_concurrent=1,
            settings={"batch_size": N, "mode": "synchronous"}, **options,
        )  # fmt: skip
        with study:
            pairs = zip(study.best_model.get_weights(), referee.get_weights(), strict=True)
            for ours, theirs in pairs:
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=path)
    with pytest.raises(ConfigError, match="'delta'"):
        sparkdl.tune.search(lambda trial: linear(2), f"{WRITTEN}/delta/p*", **options)
    with pytest.raises(DataError, match=r"spark\.readStream"):
        SparkModel(linear(2)).fit_stream(str(tmp_path), checkpoint_dir=f"{tmp_path}/check")


def test_evaluate_looks_at_no_other_columns_and_names_what_cannot_be_read(
    spark: Any, tmp_path: Path
) -> None:
    """Nanoseconds and ids that Spark's types do not hold end ``predict`` alone."""
    odd = {"t": pa.array([1] * N, pa.timestamp("ns")), "u": pa.array([2**64 - 1] * N, pa.uint64())}
    table = pa.table({"id": V, "x": arrow_table()["x"], **odd})
    path = f"{tmp_path}/a.arrow"
    feather.write_feather(table, path)
    model = SparkModel(linear(2), num_workers=1)
    assert model.evaluate(path, features="x", label="id")["loss"] >= 0
    with pytest.raises(Exception, match=r"column '[tu]' holds a value that Spark's type does not"):
        model.predict(path, features="x").collect()
    (tmp_path / "two").mkdir()
    two = write_two(tmp_path / "two", "parquet", DISAGREE["wider"][0])
    single = SparkModel(linear(1), num_workers=1)
    for call in (single.evaluate, single.fit):
        with pytest.raises(DataError) as caught:
            call(spark.read.parquet(two), features="x", label="id")
        assert "memory" not in str(caught.value)
        assert "p1.parquet" in str(caught.value)


def test_files_of_any_kind_are_validated_on(spark: Any, tmp_path: Path) -> None:
    feather.write_feather(arrow_table(), f"{tmp_path}/held.arrow")
    pq.write_table(arrow_table(), f"{tmp_path}/rows.parquet")
    frame = spark.read.parquet(f"{tmp_path}/rows.parquet")
    assert not form_of(frame).has_column("held.arrow")
    assert form_of(frame).has_column("held")
    assert form_of(frame).has_column("id")
    choice = RowChoice(SIGNATURES[2], Columns("x", "id"), f"{tmp_path}/held.arrow", 0.0, 0)
    with pytest.warns(RuntimeWarning, match="of another kind"):
        source = open_fit_source(f"{tmp_path}/rows.parquet", choice)
    assert source.frame.count() == 2 * N


def test_images_in_tfrecords_need_no_schema(spark: Any, tmp_path: Path) -> None:
    path = write_tensorflow(tmp_path)
    assert form_of(path).frame().schema["image"].dataType.simpleString() == "binary"
    columns = Columns("image", "id", decoder=lambda data: np.float32([data[2], len(data)]))
    source = open_fit_source(path, RowChoice(SIGNATURES[2], columns, None, 0.0, 0))
    assert source.files is not None
    files = FileInput.dealt(source.files, 1, 0.0, 0)
    rows = [decode(batch, source.spec).x for batch in files.batches(0, source.spec)]
    found = np.concatenate([next(iter(x.values())) for x in rows])
    np.testing.assert_array_equal(found, [[v, 3] for v in V])


def test_a_sequence_example_by_path_names_the_option(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([([[1.0], [2.0]],)], "x array<array<float>>")
    sparkdl.write_tfrecords(frame, f"{tmp_path}/s.tfrecord", record_type="SequenceExample")
    with pytest.raises(DataError, match="recordType SequenceExample"):
        form_of(f"{tmp_path}/s.tfrecord").frame()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("other", ["x", "X"])
def test_columns_that_the_session_does_not_tell_apart_are_refused(
    spark: Any, tmp_path: Path, kind: str, other: str
) -> None:
    columns = [pa.array([1.0]), pa.array([2.0]), pa.array([0])]
    table = pa.Table.from_arrays(columns, names=["x", other, "id"])
    path = f"{tmp_path}/a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=r"one name|twice|several|'x'"):
        trained(path, "x", width=1)
