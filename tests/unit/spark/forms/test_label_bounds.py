"""Columns and RDDs know what labels a loss takes; what it does not take is one DataError."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from sparkdl.data import DataSpec, decode, rows_from_numpy
from sparkdl.errors import DataError
from sparkdl.learner.signature import LabelKind, Signature, TensorSpec, model_signature
from sparkdl.spark.forms.arrays import wanted_spec
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.forms.rdds import pair_encoder

pytestmark = pytest.mark.keras

X = [[0.0, 1.0], [1.0, 0.0]]
SCHEMA = T.StructType([
    T.StructField("features", T.ArrayType(T.FloatType())), T.StructField("label", T.DoubleType()),
])  # fmt: skip


def signature(kind: LabelKind, outputs: int = 1) -> Signature:
    inputs = {"features": TensorSpec("features", (2,), "float32")}
    return Signature(
        inputs, {"y": TensorSpec("y", (outputs,), "float32")}, {"y": kind}, named_inputs=False
    )


def read(spec: DataSpec, labels: list[float]) -> Any:
    batch = pa.RecordBatch.from_pydict(
        {"features": pa.array(X, pa.list_(pa.float32())), "label": labels}
    )
    return decode(batch, spec).y["y"]


def test_labels_that_only_the_models_own_code_knows() -> None:
    """KerasRS' page on retrieval: compute_loss takes y['movie'] and y['rating'], no outputs."""
    outputs = {name: TensorSpec(name, (2,), "float32") for name in ("user", "predictions")}
    own = Signature(
        signature("own").inputs, outputs, dict.fromkeys(outputs, "own"), False, own_step=True
    )
    columns = (T.StructField(name, T.LongType()) for name in ("m", "r"))
    schema = T.StructType([*SCHEMA.fields, *columns])
    spec = make_spec(schema, own, "features", {"movie": "m", "rating": "r"})
    assert {name: label.columns for name, label in spec.labels.items()} == {
        "movie": ("m",), "rating": ("r",),
    }  # fmt: skip
    with pytest.raises(DataError, match="names other outputs"):
        make_spec(schema, signature("dense"), "features", {"movie": "m"})


def test_labels_of_a_column() -> None:
    binary = make_spec(SCHEMA, signature("binary"), "features", "label")
    assert read(binary, [0.0, 1.0]).tolist() == [[0.0], [1.0]]
    with pytest.raises(DataError, match="a label that the loss does not take"):
        read(binary, [-1.0, 1.0])
    dense = make_spec(SCHEMA, signature("dense"), "features", "label")
    assert read(dense, [-1.0, 7.0]).tolist() == [[-1.0], [7.0]]


@pytest.mark.parametrize(
    ("loss", "fits"),
    [
        ("categorical_crossentropy", True), (keras.losses.CategoricalFocalCrossentropy(), True),
        ("mse", False), ("binary_crossentropy", False), (keras.losses.Huber(), False),
    ],
)  # fmt: skip
def test_class_numbers_are_one_hot_where_the_loss_is_of_classes(loss: Any, fits: bool) -> None:
    """A forgotten Dense(1) must not train as a classifier."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", loss)
    known = model_signature(model)
    (output,) = known.outputs
    encoder = pair_encoder(known)
    rows = [(np.array(x), y) for x, y in zip(X, [2, 0], strict=True)]
    if fits:
        spec = make_spec(SCHEMA, known, "features", "label")
        batch = pa.RecordBatch.from_pydict(
            {"features": pa.array(X, pa.list_(pa.float32())), "label": [2.0, 0.0]}
        )
        assert decode(batch, spec).y[output].tolist() == [[0, 0, 1], [1, 0, 0]]
        assert all(row[-1] is None for row in encoder(rows))
        return
    with pytest.raises(DataError, match=r"(?s)compares numbers.*Dense\(1\)"):
        make_spec(SCHEMA, known, "features", "label")
    assert "compares numbers" in str(next(iter(encoder(rows)))[-1])


def test_labels_of_arrays_are_refused_on_the_driver() -> None:
    x, y = np.array(X, np.float32), np.array([-1, 1])
    with pytest.raises(DataError, match="a label that the loss does not take"):
        rows_from_numpy(x, y, None, wanted_spec(x, y, None, signature("binary")))


def test_labels_of_an_rdd() -> None:
    encoder = pair_encoder(signature("binary"))
    spec = DataSpec(encoder.features, encoder.labels)
    rows = list(encoder([(np.array(x), y) for x, y in zip(X, [1, -1], strict=True)]))
    columns = [pa.array([row[i] for row in rows], pa.binary()) for i in range(2)]
    with pytest.raises(DataError, match="row 1 of the partition"):
        decode(pa.RecordBatch.from_arrays(columns, names=list(spec.columns)), spec)
