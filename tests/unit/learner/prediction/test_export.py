"""Exports of models that this process has never called, as those are that executors trained."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.errors import ModelError, ResourceError, UnknownNameError
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.prediction.export import FORMATS, export_model
from sparkdl.learner.prediction.model_source import open_model

X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")


class Own(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dense = keras.layers.Dense(2)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x)


def sequential() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])


def two_inputs() -> Any:
    inputs = {"left": keras.Input((1,), name="left"), "right": keras.Input((3,), name="right")}
    joined = keras.layers.Concatenate()([inputs["left"], inputs["right"]])
    return keras.Model(inputs, keras.layers.Dense(2)(joined))


def subclassed() -> Any:
    model = Own()
    model.build((None, 4))
    return model


@pytest.mark.parametrize("make", [sequential, two_inputs, subclassed])
def test_a_saved_model(make: Any, tmp_path: Path) -> None:
    model = make()
    same = decode_model(encode_model(model, {"Own": Own}), compiled=False)
    x: Any = {"left": X[:, :1], "right": X[:, 1:]} if make is two_inputs else X
    export_model(model, f"{tmp_path}/exported", "tf_saved_model")
    got = open_model(f"{tmp_path}/exported").predict(x, 2)
    np.testing.assert_allclose(got, same.predict(x, verbose=0), atol=1e-6)


@pytest.mark.parametrize("make", [sequential, two_inputs])
def test_onnx(make: Any, tmp_path: Path) -> None:
    pytest.importorskip("tf2onnx")
    reference = pytest.importorskip("onnx.reference")
    model = make()
    export_model(model, f"{tmp_path}/m.onnx", "onnx")
    program = reference.ReferenceEvaluator(f"{tmp_path}/m.onnx")
    values = [X[:, :1], X[:, 1:]] if make is two_inputs else [X]
    (got,) = program.run(None, dict(zip(program.input_names, values, strict=True)))
    x: Any = {"left": X[:, :1], "right": X[:, 1:]} if make is two_inputs else X
    np.testing.assert_allclose(got, model.predict(x, verbose=0), atol=1e-6)


def test_what_is_no_format(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"(?s)expected: .*tf_saved_model.*received: "):
        export_model(sequential(), f"{tmp_path}/m", "onyx")


def test_the_formats_are_those_of_keras(tmp_path: Path) -> None:
    """A new format of a later Keras fails here."""
    with pytest.raises(ValueError, match="Supported formats") as error:
        sequential().export(f"{tmp_path}/m", format="none")
    known = ast.literal_eval(str(error.value).split("are: ")[1].rstrip("."))
    assert set(known) <= set(FORMATS)
    if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15):
        assert set(known) == set(FORMATS)


def test_the_file_of_a_format_and_the_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(self: Any, filepath: str, **_: Any) -> None:
        Path(filepath).write_bytes(b"xml")
        Path(filepath).with_suffix(".bin").write_bytes(b"bin")

    monkeypatch.setattr(keras.Model, "export", export)
    export_model(sequential(), f"{tmp_path}/m.xml", "openvino")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "m.xml": b"xml",
        "m.bin": b"bin",
    }


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises((ResourceError, ModelError), match=r"openvino"):
        export_model(sequential(), f"{tmp_path}/m.xml", "openvino")
