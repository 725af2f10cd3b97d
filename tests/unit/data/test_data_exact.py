"""Casts of decoded values: integers keep all their digits, or an error names column and value."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data import ColumnSpec, DataSpec, decode, rows_from_numpy
from sparkdl.data.conform import lost
from sparkdl.errors import DataError


@given(
    st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**24 + 1, 2**53 + 1, 2**62, -(2**63)]),
    st.sampled_from(["float16", "float32", "float64"]),
)
def test_an_integer_is_lost_exactly_where_python_finds_another_number(value: int, to: str) -> None:
    values = np.array([value, 1], "int64")
    with np.errstate(over="ignore"):
        made = values.astype(to)
    bad, _, _ = lost(values, made)
    number = float(made[0])
    assert bad[:1].any() == (not np.isfinite(number) or int(number) != value)
    assert not bad[1:].any()


def test_unsigned_integers_are_lost_alike() -> None:
    values = np.array([2**64 - 1, 2**63, 0], "uint64")
    bad, _, _ = lost(values, values.astype("float64"))
    assert bad.tolist() == [True, False, False]


def read(values: Any, dtype: str, kind: Any = None) -> Any:
    batch = pa.RecordBatch.from_pydict({"ids": pa.array(values, kind)})
    return decode(batch, DataSpec({"x": ColumnSpec(("ids",), (), dtype, "scalars")})).x["x"]


def test_rounding_an_integer_is_an_error_with_column_row_and_value() -> None:
    with pytest.raises(DataError, match=r"column 'ids', row 1 .*float32") as raised:
        read([1, 2**24 + 1], "float32")
    assert "16777217" in str(raised.value)
    assert "cast('double')" in str(raised.value)
    assert read([1, 2**24 + 2], "float32").tolist() == [1, 2**24 + 2]
    assert read([1.5, 2**24 + 1], "float32").tolist() == [1.5, 2**24]  # rounded as Keras rounds


def test_decimals_keep_the_digits_of_an_integer_input() -> None:
    kind = pa.decimal128(20, 2)
    assert read([decimal.Decimal(2**53 + 1)], "int64", kind).tolist() == [2**53 + 1]
    with pytest.raises(DataError, match="column 'ids'") as raised:
        read([decimal.Decimal("1.50")], "int64", kind)
    assert "1.50" in str(raised.value)
    assert read([decimal.Decimal("1.50")], "float32", kind).tolist() == [1.5]


def test_whole_decimals_lose_no_digit_either() -> None:
    """Spark's Parquet reader makes them of ``uint64``."""
    kind = pa.decimal128(20, 0)
    big = [decimal.Decimal(2**63), decimal.Decimal(2**64 - 2**41)]
    assert read(big, "float32", kind).tolist() == [2**63, 2**64 - 2**41]
    for odd in (2**24 + 1, 2**64 - 1):
        with pytest.raises(DataError, match="column 'ids', row 1") as raised:
            read([decimal.Decimal(1), decimal.Decimal(odd)], "float32", kind)
        assert str(odd) in str(raised.value)


def test_one_of_several_columns_loses_no_digit_either() -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([1.0, 2.0]), "ids": pa.array([1, 2**24 + 1])})
    spec = DataSpec({"x": ColumnSpec(("a", "ids"), (2,), "float32", "scalars")})
    with pytest.raises(DataError, match=r"column 'ids', row 1 .*float32"):
        decode(batch, spec)
    assert decode(batch.slice(0, 1), spec).x["x"].tolist() == [[1, 1]]


def test_arrays_of_a_dtype_that_numpy_lacks_are_read_as_float32() -> None:
    halves = pytest.importorskip("ml_dtypes").bfloat16
    rows = rows_from_numpy(np.array([[1.5], [2.5]], halves))
    assert rows.take([1]).x["features"].tolist() == [[2.5]]
    assert rows.take([1]).x["features"].dtype == np.float32
