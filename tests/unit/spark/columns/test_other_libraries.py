"""Data of other libraries are refused with a line to write, and that line makes arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.columns.local_data import input_arrays, unknown_data


def test_data_of_other_libraries_are_refused_with_a_line() -> None:
    import tensorflow as tf
    import torch

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


def test_inputs_for_predict_become_arrays() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for rows in (x.tolist(), list(x), tuple(map(tuple, x.tolist()))):
        np.testing.assert_array_equal(input_arrays(rows, ["x"]), x)
    assert input_arrays(x, ["x"]) is x
    (only,) = input_arrays([x], ["x"])  # Keras' list of a model's only input
    assert only is x
    both = input_arrays([x, x[:, 0].tolist()], ["a", "b"])
    np.testing.assert_array_equal(both[1], x[:, 0])
    named = input_arrays({"a": x.tolist(), "b": x}, ["a", "b"])
    np.testing.assert_array_equal(named["a"], x)


def test_what_keras_reads_by_itself_is_left_as_it_is() -> None:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2))).batch(2)
    for data in (dataset, tf.zeros((2, 3)), (row for row in ())):
        assert input_arrays(data, ["x"]) is data


@pytest.mark.parametrize("data", [[[1.0], [2.0, 3.0]], 7, {"x": None}, {1, 2}, [[1.0, None]]])
def test_inputs_that_predict_cannot_read(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)predict cannot read.*pad=.*createDataFrame"):
        input_arrays(data, ["x"])
