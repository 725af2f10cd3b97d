"""Arguments and data of ``fit`` that are refused before any job, and what the errors say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.config import FitConfig
from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.spark.fit.arguments import FitArguments, check_keras_arguments
from sparkdl.spark.forms.arrays import are_arrays, has_texts_or_sequences
from sparkdl.spark.forms.matching import make_spec

ONE = ColumnSpec(("y",), (), "int32", "scalars", classes=3)
SPEC = DataSpec({"x": ColumnSpec(("x",), (2,))}, {"out": ONE})


@pytest.mark.parametrize(
    "class_weight", [{}, [1.0, 2.0], {"cat": 1.0}, {0: -1.0}, {0: float("nan")}, {-1: 1.0}]
)
def test_what_class_weights_are(class_weight: Any) -> None:
    with pytest.raises(ConfigError, match="class number -> weight"):
        FitArguments(class_weight=class_weight)


def test_class_weights_of_numpy_will_do() -> None:
    weights = dict(zip(np.unique([0, 1, 2]), np.array([1.0, 2.0, 0.5]), strict=True))
    FitArguments(class_weight=weights).check_spec(SPEC)


def test_class_weights_that_have_no_meaning() -> None:
    arguments = FitArguments(class_weight={0: 1.0, 3: 2.0})
    with pytest.raises(ConfigError, match="class 3"):
        arguments.check_spec(SPEC)
    weighted = DataSpec(SPEC.features, SPEC.labels, ColumnSpec(("w",), (), kind="scalars"))
    with pytest.raises(ConfigError, match="sample weights"):
        FitArguments(class_weight={0: 1.0}).check_spec(weighted)
    two = DataSpec(SPEC.features, {"a": ONE, "b": ColumnSpec(("z",), (), kind="scalars")})
    with pytest.raises(ConfigError, match="one output"):
        FitArguments(class_weight={0: 1.0}).check_spec(two)


def test_steps_are_whole_numbers_and_have_an_effect() -> None:
    assert check_keras_arguments(object, {"steps_per_epoch": 3, "validation_steps": 2})
    for name in ("steps_per_epoch", "validation_steps"):
        with pytest.raises(ConfigError, match=name):
            FitArguments(**{name: 0})
    with pytest.raises(ConfigError, match="validation_data or validation_split"):
        FitArguments(validation_steps=2).check_spec(SPEC)


@pytest.mark.parametrize("pad", ["0", True, float("nan"), {}, {"x": "0"}, {1: 0}])
def test_what_is_padded_with_is_a_number(pad: Any) -> None:
    with pytest.raises(ConfigError, match="pad must say"):
        FitConfig(pad=pad)


def signature(**shapes: Any) -> Signature:
    inputs = {
        name: TensorSpec(name, shape, "string" if name == "text" else "float32")
        for name, shape in shapes.items()
    }
    return Signature(inputs, {"out": TensorSpec("out", (1,), "float32")}, {}, len(inputs) > 1)


def schema(**kinds: str) -> Any:
    from pyspark.sql import types as T

    made = {
        "list": T.ArrayType(T.FloatType()), "text": T.StringType(), "number": T.FloatType(),
    }  # fmt: skip
    return T.StructType([T.StructField(name, made[kind]) for name, kind in kinds.items()])


def test_pad_is_for_free_inputs_of_arrays() -> None:
    columns = schema(a="list", b="list", n="number")
    two = signature(free=(None,), fixed=(3,))
    named = {"free": "a", "fixed": "b"}
    spec = make_spec(columns, two, named, None, pad=0)
    assert spec.features["free"].padding is not None
    assert spec.features["fixed"].padding is None
    for pad in ({"fixed": 0.0}, {"other": 0.0}):
        with pytest.raises(ConfigError, match=r"one of \['free'\]"):
            make_spec(columns, two, named, None, pad=pad)
    with pytest.raises(ConfigError, match="first dimension is free"):
        make_spec(columns, signature(fixed=(3,)), "b", None, pad=0)
    with pytest.raises(DataError, match="cannot be padded"):
        make_spec(columns, signature(free=(None,)), "n", None, pad=0)
    whole = Signature({"x": TensorSpec("x", (None,), "int32")}, {}, {}, False)
    with pytest.raises(ConfigError, match="a whole number"):
        make_spec(columns, whole, "a", None, pad=0.5)
    masked = signature(free=(None,), free_mask=(None,))
    assert make_spec(columns, masked, "a", None, pad=0).features["free_mask"].kind == "mask"
    with pytest.raises(DataError, match="2 inputs"):
        make_spec(columns, masked, "a", None)


def test_text_is_for_inputs_of_text() -> None:
    columns = schema(t="text", u="text", n="number")
    assert make_spec(columns, signature(text=(1,)), "t", None).features["text"].kind == "text"
    with pytest.raises(DataError, match="StringLookup or TextVectorization"):
        make_spec(columns, signature(x=(1,)), "t", None)
    with pytest.raises(DataError, match="a column of strings"):
        make_spec(columns, signature(text=(1,)), "n", None)
    with pytest.raises(DataError, match="an input for each column"):
        make_spec(columns, signature(text=(2,)), ["t", "u"], None)


def test_which_tuples_are_arrays() -> None:
    assert are_arrays((1, 2), needs_labels=True)
    assert are_arrays([[1.0], [2.0]], needs_labels=True)
    assert not are_arrays([(1, 0), (2, 1)], needs_labels=True)  # examples, not arrays
    assert are_arrays((1,), needs_labels=False)
    assert not are_arrays((1,), needs_labels=True)
    assert has_texts_or_sequences((["a", "b"], [0, 1]))
    assert has_texts_or_sequences(([[1], [2, 3]], [0, 1]))
    assert has_texts_or_sequences(({"x": [[1], [2, 3]], "z": [0, 1]}, [0, 1]))
    assert not has_texts_or_sequences(([[1, 2], [2, 3]], [0, 1]))
