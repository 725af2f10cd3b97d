"""Columns of Arrow in every layout: the same values, in types that Spark and NumPy know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.data.decode import decode
from sparkdl.data.plain_arrow import plain, plain_type

VIEWS = tuple(int(part) for part in pa.__version__.split(".")[:2]) >= (16, 0)


def tensors(order: list[int] | None) -> Any:
    """Two tensors that lie as 2 x 3; with an order their logical shape is 3 x 2."""
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=order)
    rows = pa.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], pa.list_(pa.float32(), 6))
    return pa.ExtensionArray.from_storage(kind, rows)


COLUMNS: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "uint64": (pa.array([2**40 + 1, 3], pa.uint64()), pa.int64(), [2**40 + 1, 3]),
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
    "tensor": (
        tensors(None), pa.list_(pa.float32()), [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]],
    ),
    "permuted tensor": (
        tensors([1, 0]), pa.list_(pa.float32()), [[1, 4, 2, 5, 3, 6], [7, 10, 8, 11, 9, 12]],
    ),
}  # fmt: skip
if VIEWS:
    COLUMNS |= {
        "view of views": (
            pa.array([[[1.0], [2.0, 3.0]], None], pa.list_view(pa.list_view(pa.float32()))),
            pa.list_(pa.list_(pa.float32())), [[[1.0], [2.0, 3.0]], None],
        ),
        "text view": (pa.array(["a", "b"], pa.string_view()), pa.string(), ["a", "b"]),
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


def test_a_number_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(pa.ArrowInvalid, match="not in range"):
        plain(pa.array([2**63], pa.uint64()))


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
