"""Columns of Arrow in every layout: the same values, in types that Spark and NumPy know."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.data.decode import decode
from sparkdl.data.plain_arrow import FileColumns, holds, plain, plain_type
from sparkdl.errors import DataError

VIEWS = tuple(int(part) for part in pa.__version__.split(".")[:2]) >= (16, 0)


def tensors(order: list[int] | None) -> Any:
    """Two tensors that lie as 2 x 3; with an order their logical shape is 3 x 2."""
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=order)
    rows = pa.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], pa.list_(pa.float32(), 6))
    return pa.ExtensionArray.from_storage(kind, rows)


COLUMNS: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "uint64": (pa.array([2**40 + 1, 3], pa.uint64()), pa.decimal128(20), [2**40 + 1, 3]),
    "large uint64": (pa.array([2**64 - 1, 3], pa.uint64()), pa.decimal128(20), [2**64 - 1, 3]),
    "list of uint64": (
        pa.array([[2**40 + 1], [3]], pa.list_(pa.uint64())), pa.list_(pa.decimal128(20)),
        [[2**40 + 1], [3]],
    ),
    "half": (pa.array(np.array([0.5, 2], np.float16)), pa.float32(), [0.5, 2.0]),
    "runs": (pc.run_end_encode(pa.array([5, 5, 7])), pa.int64(), [5, 5, 7]),
    "dictionary": (pa.array(["a", "b", "a"]).dictionary_encode(), pa.string(), ["a", "b", "a"]),
    "large list": (
        pa.array([[1.0], [2.0]], pa.large_list(pa.float32())), pa.list_(pa.float32()), [[1], [2]],
    ),
    "dictionary in a list": (
        pa.array([["a"], ["b"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        pa.list_(pa.string()), [["a"], ["b"]],
    ),
    "dictionary in a struct": (
        pa.StructArray.from_arrays(
            [pa.array(["a", "b", "a"]).dictionary_encode(), pa.array([1, 2, 3], pa.uint8())],
            ["k", "n"], mask=pa.array([False, True, False]),
        ),
        pa.struct([("k", pa.string()), ("n", pa.int16())]), [
            {"k": "a", "n": 1}, None, {"k": "a", "n": 3}
        ],
    ),
    "runs in structs in a list": (
        pa.ListArray.from_arrays(
            [0, 2, 3],
            pa.StructArray.from_arrays([pc.run_end_encode(pa.array([5, 5, 7]))], ["r"]),
        ),
        pa.list_(pa.struct([("r", pa.int64())])), [[{"r": 5}, {"r": 5}], [{"r": 7}]],
    ),
    "negative scale": (
        pa.array([decimal.Decimal("3E+2")] * 2, pa.decimal128(5, -2)), pa.decimal128(7), [300, 300],
    ),
    "tensor": (
        tensors(None), pa.list_(pa.float32()), [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]],
    ),
    "permuted tensor": (
        tensors([1, 0]), pa.list_(pa.float32()), [[1, 4, 2, 5, 3, 6], [7, 10, 8, 11, 9, 12]],
    ),
}  # fmt: skip
if VIEWS:
    DICTIONARY_OF_VIEWS = pa.DictionaryArray.from_arrays(
        [0, 1, 0], pa.array(["a", "b"], pa.string_view())
    )
    COLUMNS |= {
        "view of views": (
            pa.array([[[1.0], [2.0, 3.0]], None], pa.list_view(pa.list_view(pa.float32()))),
            pa.list_(pa.list_(pa.float32())), [[[1.0], [2.0, 3.0]], None],
        ),
        "text view": (pa.array(["a", "b"], pa.string_view()), pa.string(), ["a", "b"]),
        "dictionary of views": (
            DICTIONARY_OF_VIEWS, pa.string(), ["a", "b", "a"],
        ),
        "dictionary of views in a struct": (
            pa.StructArray.from_arrays([DICTIONARY_OF_VIEWS], ["k"]),
            pa.struct([("k", pa.string())]), [{"k": "a"}, {"k": "b"}, {"k": "a"}],
        ),
        "list view": (
            pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_view(pa.float32())),
            pa.list_(pa.float32()), [[1, 2], [3, 4]],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_values_stay_and_types_become_plain(name: str) -> None:
    array, kind, values = COLUMNS[name]
    assert plain_type(array.type) == kind
    assert plain(array).to_pylist() == values
    assert plain(array[1:]).to_pylist() == values[1:]


D = pa.decimal128
HOLDS: list[tuple[pa.DataType, pa.DataType, bool]] = [
    (pa.int64(), pa.int32(), True), (pa.int32(), pa.int64(), False),
    (pa.int64(), pa.uint32(), True), (pa.int32(), pa.uint32(), False),
    (pa.float64(), pa.float32(), True), (pa.float32(), pa.float64(), False),
    (pa.float32(), pa.float16(), True), (pa.int64(), pa.float64(), False),
    (pa.float64(), pa.int64(), False), (pa.float64(), pa.int32(), True),
    (pa.string(), pa.int64(), False), (pa.int64(), pa.string(), False),
    (pa.bool_(), pa.bool_(), True), (pa.int8(), pa.bool_(), False), (pa.int64(), pa.null(), True),
    (pa.int64(), pa.duration("us"), True), (pa.duration("us"), pa.duration("ns"), True),
    (D(7, 0), D(5, -2), True), (D(20, 0), pa.uint64(), True),
    (D(5, 2), D(4, 2), True), (D(5, 2), D(5, 3), False), (D(5, 2), D(5, 1), False),
    (pa.list_(pa.float32()), pa.list_(pa.float64(), 2), False),
    (pa.list_(pa.float64()), pa.large_list(pa.float16()), True),
    (pa.list_(pa.int64()), pa.int64(), False), (pa.int64(), pa.list_(pa.int64()), False),
    (pa.binary(), pa.binary(8), True), (pa.timestamp("us"), pa.int64(), False),
]  # fmt: skip
"""What a file may hold for a column of a type; the answers are those of Spark 4.3's reader."""


@pytest.mark.parametrize(("wanted", "found", "answer"), HOLDS)
def test_a_type_holds_others_without_a_loss(
    wanted: pa.DataType, found: pa.DataType, answer: bool
) -> None:
    assert holds(wanted, found) is answer


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2, 0], [2, 1, 0]])
def test_a_tensors_axes_are_those_of_the_format(order: list[int]) -> None:
    """pyarrow 26 shows rings of axes wrongly, and 15 shows no permuted tensors."""
    numbers = np.arange(72, dtype=np.float32).reshape(3, 24)
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3, 4), permutation=order)
    rows = pa.array([*numbers.tolist(), None], pa.list_(pa.float32(), 24))
    tensors = pa.ExtensionArray.from_storage(kind, rows)
    wanted = [row.reshape(2, 3, 4).transpose(order).ravel().tolist() for row in numbers]
    assert plain(tensors).to_pylist() == [*wanted, None]
    assert plain(tensors[1:3]).to_pylist() == wanted[1:]


def test_columns_of_files_are_found_by_sparks_rule_of_capitals() -> None:
    there = pa.schema([("A", pa.int32()), ("b", pa.string()), ("B", pa.string())])
    found = FileColumns(["a", "b"], pa.schema([("a", pa.int64())]), exact=False)
    assert found.found_in("f", there) == ["A", "b"]
    for names in (["c"], ["a"]):
        with pytest.raises(DataError, match="other columns"):
            FileColumns(names).found_in("f", there)
    with pytest.raises(DataError, match="'A' in another type"):
        FileColumns(["A"], pa.schema([("A", pa.int16())])).found_in("f", there)


def test_decimals_have_sparks_digits() -> None:
    assert plain_type(D(3, 5)) == D(5, 5)
    assert plain_type(D(38, -2)) == pa.decimal256(76)  # Spark has none, and it is left out


def test_a_value_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(pa.ArrowInvalid, match="would lose data"):
        plain(pa.array([1], pa.timestamp("ns")))


def test_integers_without_a_sign_are_64_bits_wide_where_these_hold_them() -> None:
    assert plain(COLUMNS["uint64"][0]).type == pa.int64()
    assert plain(COLUMNS["list of uint64"][0]).type == pa.list_(pa.int64())
    assert plain(COLUMNS["large uint64"][0]).type == pa.decimal128(20)


@pytest.mark.parametrize("name", ["tensor", "permuted tensor", "large list", "list view", "half"])
def test_a_worker_reads_them_like_spark(name: str) -> None:
    """Tensors have the order of their logical shape, whose values NumPy shows."""
    if name not in COLUMNS:
        pytest.skip("this pyarrow has no views")
    array, _, values = COLUMNS[name]
    shape = () if name == "half" else (len(values[0]),)
    batch = pa.RecordBatch.from_arrays([array], names=["x"])
    kind = "scalars" if name == "half" else "array"
    spec = DataSpec({"x": ColumnSpec(("x",), shape, kind=kind)})  # type: ignore[arg-type]
    np.testing.assert_array_equal(decode(batch, spec).x["x"], np.array(values, np.float32))
