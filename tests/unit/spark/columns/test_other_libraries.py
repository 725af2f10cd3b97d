"""Data of other libraries are refused with a line to write, and that line makes arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkdl.spark.columns.local_data import unknown_data


def test_data_of_other_libraries_are_refused_with_a_line() -> None:
    import tensorflow as tf
    import torch

    data = tf.data.Dataset.from_tensor_slices((np.zeros((4, 2)), np.zeros(4))).batch(2)
    error = unknown_data(data)
    assert "as_numpy_iterator" in error.hint
    x, y = map(np.array, zip(*data.unbatch().as_numpy_iterator(), strict=True))  # the line
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
