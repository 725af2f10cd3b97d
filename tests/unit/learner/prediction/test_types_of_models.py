"""Dtypes of subclassed models' inputs, and outputs of steps and calls of the user's own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sparkdl.errors import ModelError
from sparkdl.layers import ServedEmbedding
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.cache import cached_predictor
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.learner.signature import TensorSpec, model_signature

IDS = np.array([[2**24 + 1, 3], [5, 2**30 + 1]], "int64")
X = np.array([[0.5, 1.0], [2.0, 3.0]], "float32")


class Both(keras.Model):
    def call(self, x: Any) -> Any:
        return x + 1


class Whole(keras.Model):
    def call(self, x: Any) -> Any:
        return ops.bitwise_and(x, 7)


class Served(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.flat = ServedEmbedding(4, name="rows"), layers.Flatten()
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.flat(self.rows(x)))


class Mixed(keras.Model):
    def call(self, x: Any) -> Any:
        return {"first": x["ids"][:, 0] + 1, "scaled": ops.log(x["x"]), "big": x["ids"] > 2**24}


class Listed(keras.Model):
    def call(self, x: Any) -> Any:
        return x[0] % 7, ops.log(x[1])


class Hashing(layers.Hashing):
    """A layer of the user's own under the name of Keras'."""


class Ranker(keras.Model):
    """Takes texts, ids and numbers; ``Hashing`` takes texts and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hashes = layers.StringLookup(vocabulary=["a", "b"]), Hashing(5)
        self.pairs = layers.HashedCrossing(5)
        self.rows, self.last = layers.Embedding(10, 4), layers.Dense(1)

    def call(self, x: Any) -> Any:
        ids = [self.words(x["name"]), self.hashes(x["any"]), *(x[f"id{i}"] for i in range(4))]
        ids.append(self.pairs((x["one"], x["two"])))
        numbers = [x["age"][:, None], *map(self.rows, ids)]
        return self.last(ops.concatenate(numbers, axis=-1))


def built(model: Any, x: Any) -> Any:
    model(x)
    return model


def test_integers_stay_integers_where_a_subclassed_model_takes_them() -> None:
    signature = model_signature(built(Both(), IDS))
    (taken,) = signature.inputs.values()
    assert [taken.dtype_for(d) for d in ("int32", "uint8", "bool", "float64")] == [
        "int32", "uint8", "bool", "float32",
    ]  # fmt: skip
    assert signature.output_dtype("output", {"features": "int64"}).startswith("int")
    assert signature.output_dtype("output", {"features": "float32"}) == "float32"


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="its symbols take floats, too")
def test_a_model_that_takes_nothing_but_integers() -> None:
    (taken,) = model_signature(built(Whole(), IDS)).inputs.values()
    assert [taken.dtype_for(d) for d in ("int32", "float32")] == ["int32", "int64"]
    assert model_signature(built(Whole(), IDS)).outputs["output"].shape == (2,)


def test_a_model_with_a_table_is_built_again_from_what_is_sent() -> None:
    model = built(Served(), IDS)
    (taken,) = model_signature(model).inputs.values()
    assert taken.dtype_for("int64") == "int64"
    again = decode_model(encode_model(model, {"Served": Served}))
    assert [v.shape for v in again.variables] == [v.shape for v in model.variables]


def test_each_input_of_several() -> None:
    for model, given in ((Mixed(), {"ids": IDS, "x": X}), (Listed(), [IDS, X])):
        signature = model_signature(built(model, given))
        ids, other = signature.inputs.values()
        assert ids.dtype_for("int64") == "int64"
        assert ids.takes_whole
        assert other.dtype_for("float64") == "float32"
        first = "first" if "first" in signature.outputs else "output_0"
        dtypes = {ids.name: "int64", other.name: "float32"}
        assert signature.output_dtype(first, dtypes).startswith("int")


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="no tensors of texts")
def test_texts_are_told_from_numbers() -> None:
    """A symbol of a text is no error to an ``Embedding``, and one of a number none to a lookup."""
    ids = {f"id{i}": IDS[:, 0] % 3 for i in range(4)}
    texts = np.array(["a", "b"])
    given = {"name": texts, **ids, "any": texts, "age": X[:, 0], "one": texts, "two": ids["id0"]}
    model = built(Ranker(), {name: ops.convert_to_tensor(value) for name, value in given.items()})
    taken = model_signature(model).inputs
    texts_of = {name for name, spec in taken.items() if spec.dtype == "string"}
    assert texts_of == {"name", "any", "one", "two"}
    assert [taken["any"].dtype_for(d) for d in ("string", "int64")] == ["string", "int64"]
    assert taken["two"].dtype_for("int64") == "int64"
    assert taken["name"].dtype_for("int64") == "string"  # a column of numbers is refused
    assert [taken["id3"].dtype_for(d) for d in ("int64", "float64")] == ["int64", "float32"]
    assert all("call" not in vars(layer) for layer in model._flatten_layers())


def test_the_texts_of_classes_are_an_output_of_texts() -> None:
    given = keras.Input((3,))
    names = layers.StringLookup(vocabulary=["a", "b", "c"], num_oov_indices=0, invert=True)
    signature = model_signature(keras.Model(given, names(ops.argmax(given, axis=-1))))
    assert [spec.dtype for spec in signature.outputs.values()] == ["string"]


def test_a_functional_model_has_the_dtypes_of_its_inputs() -> None:
    for dtype in ("int64", "bool", "float16", "float64"):
        given = keras.Input((2,), dtype=dtype)
        (taken,) = model_signature(keras.Model(given, ops.cast(given, "float32"))).inputs.values()
        assert taken == TensorSpec(taken.name, (2,), dtype)
        assert taken.dtype_for("int32") == dtype
    given = keras.Input((2,), dtype="bfloat16")
    (taken,) = model_signature(keras.Model(given, given * 2)).inputs.values()
    assert (taken.dtype, taken.dtype_for("float64")) == ("bfloat16", "float32")


class Classes(keras.Model):
    def predict_step(self, data: Any) -> Any:
        return {"class": ops.argmax(self(data), -1), "sure": self(data)[:, :1] > 0.5}


class Pair(keras.Model):
    def predict_step(self, data: Any) -> Any:
        return self(data)[:, 0], ops.cast(self(data), "float64")


class Mean(keras.Model):
    def predict_step(self, data: Any) -> Any:
        return ops.mean(self(data))


class Nested(keras.Model):
    def predict_step(self, data: Any) -> Any:
        return self(data), [self(data), self(data)]


class Called(keras.Model):
    def call(self, x: Any) -> Any:
        return ops.cast(super().call(x)[:, 1] * 10, "int32")


class Outside(keras.Model):
    def predict_step(self, data: Any) -> Any:
        values = ops.convert_to_numpy(self(data)).astype("float64")  # of no symbol
        return ops.convert_to_tensor(values[:, :2])


def network(kind: Any) -> Any:
    given = keras.Input((2,))
    model = kind(given, layers.Dense(3, activation="softmax")(given))
    if kind is Outside:
        model.compile("sgd", "mse", run_eagerly=True)
    return model


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="its steps take a state")
@pytest.mark.parametrize("kind", [Classes, Pair, Called])
def test_the_outputs_are_those_of_predict(kind: Any) -> None:
    model = network(kind)
    source, wanted = KerasSource(model), model.predict(X, verbose=0)
    with cached_predictor(source.encode(list(source.signature.outputs))) as predictor:
        made = predictor.predict({"x": X}, 2)
    flat = keras.tree.flatten(wanted)
    assert len(made) == len(flat)
    for (name, array), other in zip(made.items(), flat, strict=True):
        spec = source.signature.outputs[name]
        np.testing.assert_array_equal(array, other)
        assert (spec.shape, spec.dtype) == (other.shape[1:], other.dtype.name)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the steps are TensorFlow's")
@pytest.mark.parametrize("kind", [Mean, Nested, Outside])
def test_a_step_that_workers_cannot_run_is_an_error_before_a_job(kind: Any) -> None:
    with pytest.raises(ModelError, match="gives what cannot become columns"):
        KerasSource(network(kind))


def test_the_labels_are_those_of_the_call() -> None:
    model = network(Classes)
    assert model_signature(model).outputs.keys() == {"dense"} or len(model.outputs) == 1
    assert next(iter(model_signature(model).outputs.values())).shape == (3,)
