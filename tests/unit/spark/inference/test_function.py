"""What a function of SQL takes for the columns that it is called with; no Spark."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest

from sparkdl.errors import DataError
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.preprocessing import ROW, LayerEncoder, Preprocessing
from sparkdl.learner.signature import AS_GIVEN, Signature, TensorSpec
from sparkdl.process import payload
from sparkdl.spark.forms.matching import decoders_of
from sparkdl.spark.inference.function import UdfTask
from sparkdl.spark.inference.output_columns import OutputColumn

pytestmark = pytest.mark.keras

OUTPUT = {"y": TensorSpec("y", (), "float32")}


def task(columns: dict[str, str] | None, decoder: Any = None) -> UdfTask:
    """A function of a model whose rows a preprocessor takes: the features ``columns``, or any."""
    row = {ROW: TensorSpec(ROW, None, AS_GIVEN)}
    before = Preprocessing(None, ("a",), ("y",), columns or {})
    signature = Signature(row, OUTPUT, {}, False, preprocessing=before)
    archive = PredictorArchive(ModelArchive(b"", b"", "tensorflow", ""), "keras", "", signature)
    return UdfTask(archive, OutputColumn("p", "y"), 4, False, decoder=decoder or {})


def read(made: UdfTask, **columns: Any) -> dict[str, Any]:
    """Name of a part of a row -> kind and name of the column that it is made of."""
    inputs, batch = made.inputs, pa.RecordBatch.from_pydict(columns)
    spec = made._spec(inputs.named(batch).schema, inputs.have_names(batch.schema))
    return {name: (entry.kind, *entry.columns) for name, entry in spec.features.items()}


def test_columns_of_a_feature_space_go_by_name_or_in_its_order() -> None:
    made = task({"city": "string", "age": "float32"})
    wanted = {"city": ("text", "city"), "age": ("scalars", "age")}
    assert read(made, c0=["rome"], c1=[3.0]) == wanted
    assert read(made, c0=pa.array([{"age": 3.0, "city": "rome"}])) == wanted
    with pytest.raises(DataError, match=r"input 'city'.*\n?.*expected: text"):
        read(made, c0=[3.0], c1=["rome"])
    assert read(task({"city": "string"}), c0=["rome"]) == {"city": ("text", "city")}
    for columns in ({"c0": ["rome"], "c1": ["x"]}, {"c0": pa.array([{"town": "rome"}])}):
        with pytest.raises(DataError, match=r"input|column 'city' cannot be used"):
            read(task({"city": "string"}), **columns)


def test_a_preprocessor_takes_a_value_texts_or_parts_of_a_struct() -> None:
    made = task(None)
    assert read(made, c0=["a"]) == {ROW: ("text", ROW)}
    assert read(made, c0=["a"], c1=["b"]) == {
        "segment 0": ("text", "c0"),
        "segment 1": ("text", "c1"),
    }
    parts = pa.array([{"into": "a", "source": "b"}])
    assert read(made, c0=parts) == {"into": ("text", "into"), "source": ("text", "source")}
    image = {"origin": "", "height": 1, "width": 1, "nChannels": 1, "mode": 0, "data": b"0"}
    assert read(made, c0=pa.array([image])) == {ROW: ("image", ROW)}


def test_layers_travel_as_bytes_until_keras_is_up() -> None:
    cities = keras.layers.StringLookup(vocabulary=["rome"])
    inputs = {name: TensorSpec(name, (), "int64") for name in ("city", "kind")}
    signature = Signature(inputs, OUTPUT, {}, True)
    decoders = decoders_of({"city": cities, "kind": len}, inputs, signature)
    made = task(None, decoders)
    copy = payload.load(payload.dump(made)).decoder
    assert isinstance(copy["city"].layer, bytes)
    np.testing.assert_array_equal(copy["city"].made(np.array(["rome", "x"], object), ""), [1, 0])
    assert int(LayerEncoder.of(copy["city"])("rome")) == 1
    assert copy["kind"]("four") == 4
    for wrong, words in (({"town": cities}, "unknown input"), ({"city": 3}, "must be a function")):
        with pytest.raises(DataError, match=words):
            decoders_of(wrong, inputs, signature)
