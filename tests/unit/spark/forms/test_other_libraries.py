"""Data of other libraries are refused with a line to write, and that line makes arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import TensorSpec
from sparkdl.spark.forms.arrays import input_arrays, unknown_data

pytestmark = pytest.mark.keras


def test_data_of_other_libraries_are_refused_with_a_line() -> None:
    import tensorflow as tf

    torch = pytest.importorskip("torch")
    data = tf.data.Dataset.from_tensor_slices((np.zeros((4, 2)), np.zeros(4)))
    for rows, join in [(data, np.array), (data.batch(3), np.concatenate)]:
        hint = unknown_data(rows).hint
        assert "zip(*dataset.as_numpy_iterator())" in hint
        assert f"np.{join.__name__}" in hint
        x, y = map(join, zip(*rows.as_numpy_iterator(), strict=True))  # the line
        assert x.shape == (4, 2)
        assert y.shape == (4,)
    dataset = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    assert "torch Dataset" in unknown_data(dataset).hint
    x, y = map(np.array, zip(*dataset, strict=True))
    assert x.shape == (4, 2)

    class Sequence(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return np.zeros((3, 2)), np.zeros(3)

    assert "generator" in unknown_data(i for i in ()).hint
    assert "parallelize" in unknown_data([(1, 2)] * 5).hint
    assert "read.parquet" in unknown_data("rows.parquet").hint
    assert "fit((x, y))" in unknown_data(np.zeros(3)).hint
    made = Sequence()
    assert "np.concatenate" in unknown_data(made).hint
    x, y = map(np.concatenate, zip(*(made[i] for i in range(len(made))), strict=True))
    assert x.shape == (6, 2)
    assert y.shape == (6,)


def inputs(*names: str, shape: Any = None, dtype: str = "float32") -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, dtype) for name in names}


@pytest.mark.parametrize(
    ("data", "shape", "dtype"),
    [
        (np.zeros((2, 4)), (4,), "float32"),
        (np.zeros((0, 4), "int64"), (4,), "float32"),
        (np.zeros((2, 9, 3)), (None, 3), "float32"),
        (np.zeros(5), (1,), "float32"),  # Keras adds the last dimension
        (np.zeros((5, 1)), (), "float32"),  # and leaves it out
        (np.array(["a", "b"]), (1,), "string"),
        (np.array([["a"], [None]], object), (1,), "string"),
        (np.array([True, False]), (1,), "float32"),
        (pd.Series([1.0, 2.0]), (1,), "float32"),
        ({"whatever": np.zeros((2, 4))}, (4,), "float32"),
    ],
)
def test_arrays_for_predict_that_fit(data: Any, shape: Any, dtype: str) -> None:
    input_arrays(data, inputs("x", shape=shape, dtype=dtype))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (np.zeros((2, 3)), "(rows, 4)"),
        (np.zeros(4), "one row: x[None]"),
        (np.zeros((2, 4, 1, 1)), "(2, 4, 1, 1)"),
        ([], "(0,)"),
        (np.zeros((2, 4), object), "x.astype('float32')"),
        (["a", "b"], "dtype <U1"),
        (pd.Series([1.0, 2.0]), "(2,)"),
        ({"a": np.zeros((2, 4)), "b": np.zeros((2, 4))}, "'a', 'b'"),
    ],
)
def test_arrays_for_predict_that_do_not_fit(data: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        input_arrays(data, inputs("x", shape=(4,)))
    assert words in str(caught.value)


def test_arrays_for_predict_with_other_names_or_in_another_number() -> None:
    two, x = inputs("a", "b", shape=(4,)), np.zeros((2, 4))
    for data in ({"a": x}, {"a": x, "c": x}, [x], x):
        with pytest.raises(DataError, match=r"'a'.*'b'"):
            input_arrays(data, two)


def test_inputs_for_predict_become_arrays() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for rows in (x.tolist(), list(x), tuple(map(tuple, x.tolist()))):
        np.testing.assert_array_equal(input_arrays(rows, inputs("x")), x)
    assert input_arrays(x, inputs("x")) is x
    (only,) = input_arrays([x], inputs("x"))  # Keras' list of a model's only input
    assert only is x
    both = input_arrays([x, x[:, 0].tolist()], inputs("a", "b"))
    np.testing.assert_array_equal(both[1], x[:, 0])
    named = input_arrays({"a": x.tolist(), "b": x}, inputs("a", "b"))
    np.testing.assert_array_equal(named["a"], x)


def test_what_keras_reads_by_itself_is_left_as_it_is() -> None:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2))).batch(2)
    for data in (dataset, tf.zeros((2, 3)), (row for row in ())):
        assert input_arrays(data, inputs("x")) is data


@pytest.mark.parametrize("data", [[[1.0], [2.0, 3.0]], 7, {"x": None}, {1, 2}, [[1.0, None]]])
def test_inputs_that_predict_cannot_read(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)predict cannot read.*pad=.*createDataFrame"):
        input_arrays(data, inputs("x"))
