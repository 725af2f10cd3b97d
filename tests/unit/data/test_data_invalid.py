"""Rows that no model can take are told from those that it can, however deep the null is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import ColumnSpec, DataSpec, decode_valid, rows_with_nulls
from sparkdl.errors import DataError


def spec(**columns: ColumnSpec) -> DataSpec:
    return DataSpec(columns)


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float64())])
@pytest.mark.parametrize("offset", [0, 2])
def test_arrays(kind: Any, offset: int) -> None:
    rows = [[1, 2], [3, None], None, [5, 6], [None, None], [7, 8]]
    batch = pa.RecordBatch.from_pydict({"a": pa.array(rows, kind)}).slice(offset)
    wanted = spec(x=ColumnSpec(("a",), (2,)))
    expected = np.array([False, True, True, False, True, False])[offset:]
    assert rows_with_nulls(batch, wanted).tolist() == expected.tolist()
    decoded, valid = decode_valid(batch, wanted)
    assert valid.tolist() == (~expected).tolist()
    assert decoded.x["x"].tolist() == [[1, 2], [5, 6], [7, 8]][0 if offset == 0 else 1 :]
    assert decoded.num_rows == int(valid.sum())


def test_arrays_of_arrays_and_fixed_sizes() -> None:
    nested = pa.array([[[1, 2], [3, 4]], [[1, None], [3, 4]], [None, [3, 4]], [[5, 6], [7, 8]]],
                      pa.list_(pa.list_(pa.float32())))  # fmt: skip
    fixed = pa.array([[1, 2], None, [3, 4], [None, 5]], pa.list_(pa.float32(), 2))
    batch = pa.RecordBatch.from_pydict({"n": nested, "f": fixed})
    assert rows_with_nulls(batch, spec(x=ColumnSpec(("n",), (2, 2)))).tolist() == [0, 1, 1, 0]
    assert rows_with_nulls(batch, spec(x=ColumnSpec(("f",), (2,)))).tolist() == [0, 1, 0, 1]
    both = spec(x=ColumnSpec(("n",), (2, 2)), y=ColumnSpec(("f",), (2,)))
    decoded, valid = decode_valid(batch, both)
    assert valid.tolist() == [True, False, False, False]
    assert decoded.x["y"].tolist() == [[1, 2]]


def test_several_numeric_columns() -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([1, None, 3]), "b": pa.array([None, 2, 4])})
    decoded, valid = decode_valid(batch, spec(x=ColumnSpec(("a", "b"), (2,), kind="scalars")))
    assert valid.tolist() == [False, False, True]
    assert decoded.x["x"].tolist() == [[3, 4]]


def test_sparse_and_dense_vectors_have_nulls_by_design() -> None:
    kind = pa.struct([("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())),
                      ("values", pa.list_(pa.float64()))])  # fmt: skip
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}
    sparse = {"type": 0, "size": 2, "indices": [1], "values": [5.0]}
    batch = pa.RecordBatch.from_pydict({"v": pa.array([dense, None, sparse], kind)})
    decoded, valid = decode_valid(batch, spec(x=ColumnSpec(("v",), (2,))))
    assert valid.tolist() == [True, False, True]
    assert decoded.x["x"].tolist() == [[1, 2], [0, 5]]


def test_what_a_decoder_refuses() -> None:
    def decoder(value: bytes) -> np.ndarray:
        if value == b"bad":
            raise ValueError("no image")
        return np.zeros(3 if value == b"wide" else 2)

    image = spec(x=ColumnSpec(("i",), (2,), kind="decoded", decoder=decoder))
    values = [b"a", b"bad", None, b"wide", b"b"]
    decoded, valid = decode_valid(
        pa.RecordBatch.from_pydict({"i": pa.array(values, pa.binary())}), image
    )
    assert valid.tolist() == [True, False, False, False, True]
    assert decoded.num_rows == 2
    nothing, valid = decode_valid(
        pa.RecordBatch.from_pydict({"i": pa.array([b"bad", None])}), image
    )
    assert not valid.any()
    assert nothing.num_rows == 0


def test_a_wrong_width_is_an_error_of_all_the_data() -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([[1.0, 2.0, 3.0], None])})
    with pytest.raises(DataError, match=r"shape \(2,\)"):
        decode_valid(batch, spec(x=ColumnSpec(("a",), (2,))))
