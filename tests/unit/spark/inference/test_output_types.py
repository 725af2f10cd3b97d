"""A column of predictions has the dtype of the model's output, and no integer changes in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import ColumnSpec
from sparkdl.errors import DataError, ModelError
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Shape, Signature, TensorSpec
from sparkdl.spark.inference.output_columns import OutputColumn, to_arrow

TYPES = {
    "bool": "boolean", "int8": "tinyint", "uint8": "smallint", "int16": "smallint",
    "uint16": "int", "int32": "int", "uint32": "bigint", "int64": "bigint", "uint64": "bigint",
    "float16": "float", "bfloat16": "float", "float8_e4m3fn": "float", "float32": "float",
    "float64": "double", "string": "string",
}  # fmt: skip


def archive(dtype: str, shape: Shape | None = (), whole: str | None = None) -> PredictorArchive:
    signature = Signature(
        {"x": TensorSpec("x", (2,), "float32", True)}, {"y": TensorSpec("y", shape, dtype)},
        {"y": "dense"}, False, whole_outputs={} if whole is None else {"y": whole},
    )  # fmt: skip
    return PredictorArchive(ModelArchive(b"", b"", "tensorflow", ""), "keras", "", signature)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_dtype_has_a_column(dtype: str) -> None:
    for shape, template in (((), "{}"), ((3,), "array<{}>")):
        model = archive(dtype, shape)
        column = OutputColumn("p", "y").typed(model)
        assert column.field(model).dataType.simpleString() == template.format(TYPES[dtype])
        if not dtype.startswith(("bfloat", "float8", "string")):
            made = np.ones((4, *shape), dtype)
            arrow = to_arrow([column.values(made, None)], column.arrow_type(model))
            assert arrow.to_pylist() == made.tolist()


def test_a_dtype_without_a_column_is_an_error_before_a_job() -> None:
    with pytest.raises(ModelError, match="output 'y' cannot become a column"):
        OutputColumn("p", "y").typed(archive("complex64"))


def test_integers_where_the_inputs_are_integers() -> None:
    model = archive("float32", whole="int64")
    for given, wanted in (("int32", "int64"), ("bool", "int64"), ("float32", "float32")):
        spec = ColumnSpec(("c",), (2,), given)
        assert OutputColumn("p", "y").typed(model, {"x": spec}).dtype == wanted
    # A function of SQL is typed before it is called: float64 holds both.
    assert OutputColumn("p", "y").typed(model).dtype == "float64"


@pytest.mark.parametrize("column", [
    OutputColumn("p", "y", dtype="float64"), OutputColumn("p", "y", vector=True),
    OutputColumn("p", "y", dtype="float32"),
])  # fmt: skip
def test_a_dtype_that_is_asked_for_loses_no_digit(column: OutputColumn) -> None:
    model = archive("int64", (1, 2) if column.dtype else (2,))
    typed = column.typed(model)
    assert typed.values(np.array([[3, 2**24]]), None).tolist() == [[3, 2**24]]
    with pytest.raises(DataError, match=r"column 'p' of float.* cannot hold") as raised:
        typed.values(np.array([[3, 2**53 + 1]]), None)
    assert str(2**53 + 1) in str(raised.value)


def test_texts() -> None:
    column = OutputColumn("p", "y").typed(archive("string", (1,)))
    made = column.values(np.array([[b"a"], ["\u00e4".encode()]], object), None)
    assert to_arrow([made], pa.string()).to_pylist() == ["a", "\u00e4"]


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        (np.ones(2, "float32"), pa.list_(pa.float32()), [[1.0], [1.0]]),
        (np.ones((2, 1), "float32"), pa.list_(pa.float32()), [[1.0], [1.0]]),
        (np.ones((2, 1), "float32"), pa.float32(), [1.0, 1.0]),
    ],
)
def test_an_output_of_unknown_shape(values: Any, kind: pa.DataType, wanted: Any) -> None:
    assert to_arrow([values], kind).to_pylist() == wanted


def test_another_shape_than_the_column_has() -> None:
    with pytest.raises(DataError, match="other values than its column has"):
        to_arrow([np.ones((2, 3), "float32")], pa.float32())
