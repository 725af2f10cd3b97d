"""Columns of texts that a layer of Keras takes, before a model or in it."""

from __future__ import annotations

import pickle
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from keras import layers
from pyspark.sql import types as T

from sparkdl.data import decode
from sparkdl.errors import DataError, ModelError
from sparkdl.learner.preprocessing import LayerEncoder
from sparkdl.learner.signature import model_signature
from sparkdl.process import payload
from sparkdl.spark.forms.matching import make_spec

pytestmark = pytest.mark.keras

SCHEMA = T.StructType([
    T.StructField("text", T.StringType()), T.StructField("kind", T.StringType()),
    T.StructField("number", T.DoubleType()),
])  # fmt: skip
TEXTS, KINDS = ["a dog", "the b", "a"], ["no", "yes", "no"]
ROWS = pa.RecordBatch.from_pydict({"text": TEXTS, "kind": KINDS, "number": [0.0, 1.0, 2.0]})
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def model(loss: Any = "sparse_categorical_crossentropy", length: int | None = 4) -> Any:
    made = keras.Sequential([
        keras.Input((length,)), layers.Embedding(9, 3), layers.GlobalAveragePooling1D(),
        layers.Dense(2, activation="softmax"),
    ])  # fmt: skip
    made.compile("sgd", loss)
    return made


def words(**settings: Any) -> Any:
    return layers.TextVectorization(vocabulary=["a", "dog", "the"], **settings)


def kinds(**settings: Any) -> Any:
    return layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0, **settings)


@pytest.mark.parametrize("length", [4, None])
def test_texts_before_a_model(length: int | None) -> None:
    layer = words(output_sequence_length=length)
    mine = model(length=length)
    decoder = {"features": layer, "label": kinds()}
    spec = make_spec(SCHEMA, model_signature(mine), "text", "kind", decoder=decoder)
    for given in (spec, pickle.loads(payload.dump(spec))):  # as a worker gets it
        batch = decode(ROWS, given)
        (x,), (y,) = batch.x.values(), batch.y.values()
        np.testing.assert_array_equal(x, keras.ops.convert_to_numpy(layer(np.array(TEXTS))))
        assert y.dtype == np.int32
        assert y.tolist() == [0, 1, 0]
        none = decode(ROWS.slice(0, 0), given)
        assert {len(a) for a in (*none.x.values(), *none.y.values())} == {0}
    assert spec.is_padded is (length is None)


def test_labels_as_one_hot_vectors_and_by_the_name_of_their_output() -> None:
    mine = model("categorical_crossentropy")
    (output,) = model_signature(mine).outputs
    for layer in (kinds(), kinds(output_mode="one_hot")):
        spec = make_spec(
            SCHEMA, model_signature(mine), ["number"] * 4, "kind", decoder={output: layer}
        )
        rows = decode(ROWS, spec).y[output]
        np.testing.assert_array_equal(rows, [[1, 0], [0, 1], [1, 0]])


def test_a_label_that_the_layer_does_not_know() -> None:
    mine = model()
    spec = make_spec(
        SCHEMA, model_signature(mine), ["number"] * 4, "text", decoder={"label": kinds()}
    )
    with pytest.raises(DataError, match=r"column 'text'.*cannot take these texts"):
        decode(ROWS, spec)
    three = layers.StringLookup(vocabulary=["no", "yes"])
    spec = make_spec(
        SCHEMA, model_signature(mine), ["number"] * 4, "kind", decoder={"label": three}
    )
    with pytest.raises(DataError, match="label out of range"):
        decode(ROWS, spec)


@pytest.mark.parametrize(
    ("label", "decoder", "match"),
    [
        ("number", {"label": kinds()}, "one column of strings"),
        ("kind", {"label": len}, "makes numbers of a column of strings"),
        ("kind", {"other": kinds()}, "unknown input"),
        ("kind", None, "integer class labels"),
    ],
)
def test_what_no_layer_takes_is_refused_before_a_job(label: str, decoder: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        make_spec(SCHEMA, model_signature(model()), ["number"] * 4, label, decoder=decoder)


def test_an_encoder_travels_with_what_it_has_adapted_to() -> None:
    layer = layers.TextVectorization(output_sequence_length=2)
    layer.adapt(np.array(TEXTS))
    copy = pickle.loads(payload.dump(LayerEncoder(layer)))
    texts = np.array(["the dog", "b"], object)
    np.testing.assert_array_equal(copy.made(texts, "'text'"), LayerEncoder(layer).made(texts, ""))


class Subclassed(keras.Model):
    """Makes tokens of its texts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = words(output_mode="multi_hot"), layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.head(self.words(inputs))


@pytest.mark.skipif(not ON_TENSORFLOW, reason="other backends have no tensors of text")
def test_a_subclassed_model_takes_texts() -> None:
    mine = Subclassed()
    mine(keras.ops.convert_to_tensor(np.array(TEXTS)))
    mine.compile("sgd", "mse")
    spec = make_spec(SCHEMA, model_signature(mine), "text", None)
    assert spec.features["features"].kind == "text"
    assert model_signature(mine).outputs["output"].shape == (2,)


@pytest.mark.skipif(ON_TENSORFLOW, reason="TensorFlow has tensors of text")
def test_texts_in_a_model_are_refused_where_there_are_no_tensors_of_them() -> None:
    inputs = keras.Input((1,), dtype="string")
    mine = keras.Model(inputs, layers.Embedding(9, 3)(words()(inputs)))
    mine.compile("sgd", "mse")
    with pytest.raises(ModelError, match="no tensors") as caught:
        model_signature(mine)
    assert "decoder=" in caught.value.hint
