"""Frames of tables that nobody uses any more are given back before the JVM is full."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.errors import DataError, ResourceError
from sparkdl.spark.forms import shipped
from sparkdl.spark.forms.shipped import plain_columns, ship_table


class Frame:
    """In a reference cycle, as everything of py4j."""

    def __init__(self) -> None:
        self.itself = self


class Session:
    pass


@pytest.fixture(autouse=True)
def frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "frame_of_table", lambda spark, table: Frame())


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_frames_that_are_gone_hold_at_most_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_LIMIT_BYTES", 1000)
    monkeypatch.setattr(shipped, "_shipped_bytes", 0)
    table = pa.table({"x": np.zeros(50)})  # 400 bytes
    kept = ship_table(Session(), table)
    made = [weakref.ref(ship_table(Session(), table)) for _ in range(4)]
    assert [frame() is not None for frame in made] == [False, False, False, True]
    assert kept.itself is kept


def test_a_table_above_the_limit_frees_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_LIMIT_BYTES", 1000)
    monkeypatch.setattr(shipped, "_shipped_bytes", 0)
    table = pa.table({"x": np.zeros(500)})
    made = [weakref.ref(ship_table(Session(), table)) for _ in range(3)]
    assert [frame() is not None for frame in made] == [False, False, True]


def test_rows_too_large_for_the_jvm_of_a_cluster_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shipped, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shipped, "_jvm_memory", lambda spark: 1_000_000_000)
    monkeypatch.setattr(shipped, "is_local", lambda spark: False)
    row = np.zeros(100_000_000, np.int8)
    fits, too_many = ({str(n): row for n in range(count)} for count in (8, 9))
    assert isinstance(ship_table(Session(), pa.table(fits)), Frame)
    with pytest.raises(ResourceError) as raised:
        ship_table(Session(), pa.table(too_many))
    assert "800 MB" in raised.value.expected
    assert "900 MB in 100,000,000 rows" in raised.value.received
    assert "spark.driver.memory=3g" in raised.value.hint


def test_columns_that_parquet_has_otherwise_stay_out_of_files() -> None:
    def fits(kind: pa.DataType) -> bool:
        return shipped._fits_files(pa.schema([("column", kind)]))

    assert all(map(fits, [pa.int64(), pa.string(), pa.list_(pa.list_(pa.float32()))]))
    assert not any(
        map(fits, [pa.null(), pa.duration("us"), pa.timestamp("us"), pa.list_(pa.null())])
    )


def test_one_column_that_spark_cannot_have_is_not_the_end_of_the_others() -> None:
    def fails() -> pa.Array:
        return pa.array([1, "a"])

    odd = pa.array([1], pa.timestamp("ns"))
    months = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    columns = {"x": pa.array([1], pa.uint8()), "odd": odd, "months": months}
    table, lacking, refused = plain_columns(
        [*((name, lambda name=name: columns[name]) for name in columns), ("mixed", fails)]
    )
    assert table.schema == pa.schema([("x", pa.int16())])
    assert sorted(lacking) == ["mixed", "months"]
    assert "month_day_nano" in lacking["months"].received
    assert "ArrowInvalid" in lacking["mixed"].received
    assert list(refused) == ["odd"]
    assert isinstance(refused["odd"], DataError)
    assert "'odd' holds a value" in refused["odd"].what
