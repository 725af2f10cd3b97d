"""A model known by its file: what it takes and gives, without its weights; then scored."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.learner.archives.archive import encode_model, model_bytes
from sparkdl.learner.cache import cached_predictor
from sparkdl.learner.prediction.model_source import ArchiveSource, KerasSource, outline_of

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


class Told(keras.initializers.Initializer):
    """Counts how often a first value is made."""

    calls = 0

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        Told.calls += 1
        return keras.ops.ones(shape, dtype)


class Fixed(keras.layers.Layer):
    """Has a variable whose value is not an initializer's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = keras.Variable(np.float32(2))

    def call(self, x: Any) -> Any:
        return x * self.factor


def one_output(*, compiled: bool) -> Any:
    model = keras.Sequential(
        [keras.Input((4,), name="x"), keras.layers.Dense(8, name="dense"),
         keras.layers.BatchNormalization(),
         keras.layers.Dropout(0.5), keras.layers.Dense(3, activation="softmax", name="head")]
    )  # fmt: skip
    if compiled:
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    return model


def two_outputs(*, compiled: bool) -> Any:
    x = keras.Input((4,), name="x")
    shared = keras.layers.Dense(5)
    out = {"a": keras.layers.Dense(2, name="a")(shared(x)), "b": keras.layers.ReLU()(shared(x))}
    model = keras.Model(x, out)
    if compiled:
        model.compile("sgd", {"a": "mse", "b": "mae"})
    return model


def source_of(model: Any, objects: dict[str, Any] | None = None) -> ArchiveSource:
    archive = encode_model(model, objects)
    outline = outline_of(archive.content, objects or {}, safe_mode=True)
    assert outline is not None
    digest = hashlib.sha256(archive.content).hexdigest()
    return ArchiveSource(archive, objects or {}, outline, digest)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [one_output, two_outputs])
def test_the_outline_says_what_the_model_would(make: Any, compiled: bool) -> None:
    model = make(compiled=compiled)
    source, whole = source_of(model), KerasSource(model)
    assert source.signature == whole.signature
    mine = source.encode(list(source.signature.outputs))
    theirs = whole.encode(list(whole.signature.outputs))
    assert mine.scores == theirs.scores
    assert mine.signature.outputs == theirs.signature.outputs
    with cached_predictor(mine) as predictor:
        got = predictor.predict({"x": X}, 8)
    with cached_predictor(theirs) as predictor:
        want = predictor.predict({"x": X}, 8)
    assert list(got) == list(want) == list(whole.signature.outputs)
    for name, values in got.items():
        np.testing.assert_array_equal(values, want[name])


def test_a_model_without_optimizer_travels_as_its_file() -> None:
    model = one_output(compiled=False)
    archive = encode_model(model)
    outline = outline_of(archive.content, {}, safe_mode=True)
    assert outline is not None
    source = ArchiveSource(archive, {}, outline, "digest")
    assert source.encode(["head"]).archive is archive
    assert list(source.encode([], ["dense"]).signature.outputs) != ["head"]
    np.testing.assert_allclose(source.predict(X, 4), model.predict(X, verbose=0), atol=1e-6)


def test_no_variable_of_the_outline_gets_a_value() -> None:
    objects = {"Told": Told}
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer=Told())])
    archive = encode_model(model, objects)
    Told.calls = 0
    assert outline_of(archive.content, objects, safe_mode=True) is not None
    made = Told.calls  # while shapes are followed, which computes nothing
    with keras.StatelessScope():
        pass  # at its end Keras gives all waiting variables of this thread their values
    assert Told.calls == made
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkdl-outline")]


def test_what_has_no_outline() -> None:
    fixed = keras.Sequential([keras.Input((4,)), Fixed()])
    archive = encode_model(fixed)
    assert outline_of(archive.content, {"Fixed": Fixed}, safe_mode=True) is None
    unknown = outline_of(archive.content, {}, safe_mode=True)
    assert unknown is None
    code = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x + 1)])
    content = model_bytes(code)
    assert outline_of(content, {}, safe_mode=True) is None
    assert outline_of(content, {}, safe_mode=False) is not None
