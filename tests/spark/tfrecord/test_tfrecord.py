"""TFRecords as DataFrames, on real executors and over Spark Connect's rules for Python sources."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from needed import needs_spark
from pyspark.errors import AnalysisException

import sparkdl
from sparkdl.data.tfrecord.framing import frame
from sparkdl.errors import ResourceError

SCHEMA = (
    "id bigint, value float, name string, raw binary, ids array<bigint>, "
    "levels array<float>, names array<string>"
)
ROWS = [
    (1, 1.5, "a", b"\xff", [1, 2], [0.5], ["x"]),
    (-(2**63), None, "é✓", b"", [], [], []),
    (2**63 - 1, -0.0, None, None, None, None, None),
    (0, 3.0, "", b"abc", [-1], [1.0, 2.0], ["", "ü"]),
]


def rows_of(frame_: Any) -> list[tuple[Any, ...]]:
    rows = (tuple(bytes(v) if isinstance(v, bytearray) else v for v in r) for r in frame_.collect())
    return sorted(rows, key=lambda row: row[0])


@needs_spark(4, 0, "no data sources in Python; read_tfrecords and write_tfrecords work")
def test_there_and_back_by_the_format_alone(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "records")
    sparkdl.register_tfrecord(spark)  # Spark's own search is tried in connect_tfrecord.py
    df = spark.createDataFrame(ROWS, SCHEMA).repartition(2)
    df.write.format("tfrecord").mode("append").save(path)
    assert (tmp_path / "records" / "_SUCCESS").exists()
    assert not (tmp_path / "records" / "_temporary").exists()
    back = spark.read.format("tfrecord").schema(SCHEMA).load(path)
    assert rows_of(back) == sorted(ROWS, key=lambda row: row[0])
    found = spark.read.format("tfrecord").option("binaryFeatures", "raw").load(path)
    types = {field.name: field.dataType.simpleString() for field in found.schema}
    assert types["ids"] == "array<bigint>"
    assert types["value"] == "float"
    assert types["raw"] == "binary"
    df.write.format("tfrecord").mode("overwrite").option("codec", "gzip").save(path)
    again = spark.read.format("tfrecord").schema("id bigint").load(path)
    assert sorted(row.id for row in again.collect()) == sorted(row[0] for row in ROWS)


def test_save_modes_folders_and_patterns(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "days")
    df = spark.createDataFrame([(i, i % 3 if i else None) for i in range(20)], "x bigint, day int")
    sparkdl.write_tfrecords(df, path, partition_by="day", rows_per_file=2)
    with pytest.raises(ResourceError, match="already"):
        sparkdl.write_tfrecords(df, path)
    sparkdl.write_tfrecords(df, path, mode="ignore")
    back = sparkdl.read_tfrecords(spark, path)
    assert back.schema.simpleString() == "struct<x:bigint,day:int>"  # as Spark types it
    assert {tuple(r) for r in back.collect()} == {tuple(r) for r in df.collect()}
    one = sparkdl.read_tfrecords(spark, f"{path}/day=1/*.tfrecord", "x bigint")
    assert sorted(r.x for r in one.collect()) == [i for i in range(1, 20) if i % 3 == 1]
    sparkdl.write_tfrecords(df, path, mode="overwrite", codec="zlib")
    assert sparkdl.read_tfrecords(spark, path).count() == 20


@needs_spark(4, 0, "no data sources in Python; read_tfrecords and write_tfrecords work")
def test_options_of_spark_that_choose_files(spark: Any, tmp_path: Path) -> None:
    sparkdl.register_tfrecord(spark)
    places = ["a.tfrecord", "b.old", "more/d.tfrecord", "days/day=3/c.tfrecord", "days/loose"]
    for number, place in enumerate(places):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        df = spark.createDataFrame([(number,)], "x bigint").coalesce(1)
        sparkdl.write_tfrecords(df, str(tmp_path / "_new"), "overwrite")
        next((tmp_path / "_new").glob("part*")).rename(tmp_path / place)

    def read(folder: str = "", **options: Any) -> tuple[list[int], list[str]]:
        found = spark.read.format("tfrecord").options(**options).load(f"{tmp_path}/{folder}")
        return sorted(row.x for row in found.collect()), found.columns

    with pytest.raises(AnalysisException, match="different partitions"):
        read()  # Spark: conflicting directory structures
    shutil.move(tmp_path / "days", tmp_path / ".days")
    assert read() == ([0, 1], ["x"])
    assert read(pathGlobFilter="*.tfrecord") == ([0], ["x"])
    assert read(pathGlobFilter="[bc].{old,tfrecord}") == ([1], ["x"])
    assert read(recursiveFileLookup=True) == ([0, 1, 2], ["x"])
    assert read(recursiveFileLookup="true", pathGlobFilter="d*") == ([2], ["x"])
    assert read(".days") == ([3], ["x", "day"])
    assert read(".days", recursiveFileLookup=True) == ([3, 4], ["x"])
    with pytest.raises(AnalysisException, match="pathGlobFilter and recursiveFileLookup choose"):
        read(pathGlobFilter="*.csv")
    for name in ("modifiedafter", "mergeschema", "header"):  # Spark hands them over so
        with pytest.raises(AnalysisException, match=f"{name}(?s:.)*pathGlobFilter"):
            read(**{name: "true"})


def test_sequences_byte_arrays_and_vectors(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    path = str(tmp_path / "sequences")
    rows = [(1, [[1, 2], [3]], [["a"], []]), (2, [], None)]
    df = spark.createDataFrame(
        rows, "id bigint, steps array<array<bigint>>, w array<array<string>>"
    )
    sparkdl.write_tfrecords(df, path, record_type="SequenceExample")
    back = sparkdl.read_tfrecords(spark, path, record_type="SequenceExample")
    assert rows_of(back.select("id", "steps", "w")) == rows

    records = tmp_path / "plain.tfrecord"
    records.write_bytes(frame(b"one") + frame(b""))
    plain = sparkdl.read_tfrecords(spark, str(records), record_type="ByteArray")
    assert [bytes(row.byteArray) for row in plain.collect()] == [b"one", b""]

    vectors = spark.createDataFrame(
        [(Vectors.sparse(3, {1: 2.0}),), (Vectors.dense(1, 2, 3),)], ["v"]
    )
    sparkdl.write_tfrecords(vectors, str(tmp_path / "vectors"))
    found = sparkdl.read_tfrecords(spark, str(tmp_path / "vectors")).collect()
    assert sorted(list(row.v) for row in found) == [[0.0, 2.0, 0.0], [1.0, 2.0, 3.0]]


@pytest.mark.oldest
def test_there_and_back(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "records")
    df = spark.createDataFrame(ROWS, SCHEMA).repartition(3)
    sparkdl.write_tfrecords(df, path)
    assert (tmp_path / "records" / "_SUCCESS").exists()
    assert not (tmp_path / "records" / "_temporary").exists()
    assert rows_of(sparkdl.read_tfrecords(spark, path, SCHEMA)) == sorted(ROWS, key=lambda r: r[0])
    found = sparkdl.read_tfrecords(spark, path, binary_features=["raw"])
    types = {field.name: field.dataType.simpleString() for field in found.schema}
    assert (types["ids"], types["value"], types["raw"]) == ("array<bigint>", "float", "binary")
    wrong = spark.createDataFrame([(1, {"a": 1})], "x bigint, m map<string, int>")
    with pytest.raises(Exception, match="map"):
        sparkdl.write_tfrecords(wrong, path, "overwrite")
    assert sparkdl.read_tfrecords(spark, path, "id bigint").count() == len(ROWS)
    sparkdl.write_tfrecords(df, path, "overwrite", codec="gzip")
    again = sparkdl.read_tfrecords(spark, path, "id bigint")
    assert sorted(row.id for row in again.collect()) == sorted(row[0] for row in ROWS)


def test_a_broken_file_is_named_and_its_byte(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "broken.tfrecord"
    sound = frame(b"\x0a\x00")
    path.write_bytes(sound + sound[:-1] + struct.pack("B", sound[-1] ^ 1))
    with pytest.raises(Exception, match=rf"record 1 of .*broken\.tfrecord, at byte {len(sound)}"):
        sparkdl.read_tfrecords(spark, str(path), "x bigint").collect()
    with pytest.raises(Exception, match="no files at"):
        sparkdl.read_tfrecords(spark, str(tmp_path / "nothing*"), "x bigint").collect()


@needs_spark(4, 0, "its packages have no Connect server")
@pytest.mark.slow
def test_on_spark_connect() -> None:
    script = Path(__file__).parents[1] / "scripts" / "connect_tfrecord.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert "CONNECT TFRECORD OK" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
