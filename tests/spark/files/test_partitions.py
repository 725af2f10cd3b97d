"""Columns that folders ``name=text`` give have Spark's types and values in files of every kind.

The referee is ``spark.read.parquet`` on the same folders: each case is a column of one tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

import sparkdl
from sparkdl.data.tfrecord.framing import frame
from sparkdl.spark.forms.opening import form_of

NULL = "__HIVE_DEFAULT_PARTITION__"
CASES = {
    "whole": ("007", "+8", "-3"), "limits": ("2147483647", "-2147483648", "0"),
    "long": ("2147483648", "1", NULL), "large": ("9223372036854775808", "1", "-1"),
    "digits38": ("9" * 38, "1", "2"), "digits39": ("9" * 39, "1", "2"),
    "exact": ("1e3", "2", "1.0e1"), "dot": ("1.", "2", "3"), "zeros": ("0e3", "000.0e2", "0"),
    "wide": ("12345678901234567890", "9999999999", "1"), "double": ("0.5", "1", ".25"),
    "large and half": ("9999999999", "0.5", "1"), "exact and half": ("1e3", "0.5", "1"),
    "java": ("1d", "2.5F", "0x1p3"), "odd": ("NaN", "-Infinity", "1e999"),
    "spaces": (" 1", "2", "3 "), "no number": ("1_000", "2", "3"), "nan": ("nan", "1", "inf"),
    "arabic": ("\u0661", "2", "3"), "nothing": (NULL, NULL, NULL), "text": ("a", "1", NULL),
    "truth": ("true", "false", "true"), "escaped": ("a%2Fb", "%31", "c%"),
    "bytes": ("Z%C3%BCrich", "Zürich", "%e2%82%ac"), "escaped number": ("%31", "2", "3"),
    "plus": ("a+b", "a b", "a%20b"), "day": ("2020-02-29", "2021-12-31", NULL),
    "no day": ("2021-02-29", "2020-01-01", "2020-01-02"),
    "short day": ("2020-1-1", "2020-01-01", "2020-01-02"),
    "basic day": ("20200101", "20210101", "1"), "week": ("2020-W01-1", "2020-01-01", "2020-01-02"),
    "day and number": ("2020-01-01", "1", "2"),
    "moment": ("2024-01-01 10:00:00", "2024-07-01 10%3A00%3A00", NULL),
    "tenth": ("2024-01-01 10:00:00.5", "2024-01-01 10:00:00", "2024-01-01 10:00:01"),
    "more digits": ("2024-01-01 10:00:00.25", "2024-01-01 10:00:00", "2024-01-01 10:00:01"),
    "moment and day": ("2024-01-01 10:00:00", "2024-01-02", "2024-01-03"),
    "letter": ("2024-01-01T10:00:00", "2024-01-01 10:00:00", "2024-01-02 10:00:00"),
    "zoned": ("2024-01-01 10:00:00Z", "2024-01-01 10:00:00", "2024-01-02 10:00:00"),
    "no moment": ("2024-01-01 24:00:00", "2024-01-01 10:00:00", "2024-01-02 10:00:00"),
    "clock change": ("2024-03-10 02:30:00", "2024-11-03 01:30:00", "2024-01-01 00:00:00"),
    "clock": ("10:00:00", "23%3A59%3A59", "00:00:00"),
    "clock part": ("10:00:00.25", "10:00:00", "1"),
    "clock parts": ("10:00:00.25", "10:00:00.000001", "10:00:00.5"),
    "minutes": ("10:00", "11:00", "12:00"), "month": ("2024-01", "2024-02", "2024-03"),
    "a%20b": ("1", "2", "3"), "c%3Ad": ("x", "y", "z"),
}  # fmt: skip


def record(number: int) -> bytes:
    """A record of TFRecord with one feature ``id``."""
    entry = b"\x0a\x02id\x12\x05\x1a\x03\x0a\x01" + bytes([number])
    return frame(b"\x0a\x0d\x0a\x0b" + entry)


def written(folder: Path) -> Path:
    """A tree with three files of each kind."""
    for number in range(3):
        parts = "/".join(f"{name}={texts[number]}" for name, texts in CASES.items())
        for kind in ("parquet", "arrow", "tfrecord"):
            (folder / kind / parts).mkdir(parents=True)
        table = pa.table({"id": [number]})
        pq.write_table(table, folder / "parquet" / parts / "a.parquet")
        feather.write_feather(table, str(folder / "arrow" / parts / "a.arrow"))
        (folder / "tfrecord" / parts / "a.tfrecord").write_bytes(record(number))
    return folder


def columns(data: Any) -> dict[str, tuple[str, list[str]]]:
    """Each column's type and values; NaN as text, which equals itself."""
    rows = data.sort("id").collect()
    return {
        field.name: (field.dataType.simpleString(), [str(row[field.name]) for row in rows])
        for field in data.schema
    }


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"spark.sql.session.timeZone": "America/New_York"}, marks=pytest.mark.oldest),
        {"spark.sql.session.timeZone": "GMT+05:30", "spark.sql.timestampType": "TIMESTAMP_NTZ"},
        {"spark.sql.session.timeZone": "+05:30"},
        {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"},
    ],
)
def test_folders_give_the_columns_that_spark_sees_in_them(
    spark: Any, tmp_path: Path, settings: dict[str, str]
) -> None:
    folder = written(tmp_path)
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        wanted = columns(spark.read.parquet(f"{folder}/parquet"))
        assert len(wanted) == len(CASES) + 1
        for given in (
            form_of(f"{folder}/arrow").frame(),
            form_of(f"{folder}/tfrecord").frame(),
            sparkdl.read_tfrecords(spark, f"{folder}/tfrecord"),
        ):
            assert columns(given) == wanted
    finally:
        for name in settings:
            spark.conf.unset(name)
