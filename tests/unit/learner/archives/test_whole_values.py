"""A kept model of Keras' own layers gets another one's values without its file."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.saving import saving_lib

from sparkdl.learner.archives.archive import decode_model, encode_model, restore_state

pytestmark = pytest.mark.keras

X = np.random.default_rng(0).integers(0, 9, (64, 6)).astype("int32")
Y = X.sum(1, keepdims=True).astype("float32")


def values(model: Any) -> list[np.ndarray]:
    found = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(v.value) for v in found]


def is_whole(model: Any) -> bool:
    return encode_model(model).open_beside().whole


def network(*more: Any, width: int = 8, optimizer: Any = "adam") -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"), layers.Embedding(9, width), *more,
            layers.Conv1D(width, 3), layers.BatchNormalization(), layers.LSTM(width),
            layers.Dropout(0.3), layers.Dense(1),
        ]
    )  # fmt: skip
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("width", [8, 58])  # 58: slots that are 0 do not travel
def test_a_kept_model_gets_every_value(width: int) -> None:
    kept = decode_model(encode_model(network(width=width)))
    kept.fit(X, Y, verbose=0)
    trained, new = network(width=width), network(width=width)
    trained.fit(X, Y, verbose=0)
    for model in (new, trained, new):
        archive = encode_model(model)
        with patch.object(keras.Model, "load_weights", side_effect=AssertionError("its file")):
            restore_state(kept, archive)
        for mine, its in zip(values(model), values(kept), strict=True):
            np.testing.assert_array_equal(mine, its)
    sent = sum(value.size for value in archive.values.values())
    assert (sent < sum(value.size for value in values(new))) == (width == 58)


class Own(layers.Layer):
    """Keeps more than its variables."""

    def call(self, x: Any) -> Any:
        return x


class OwnAdam(keras.optimizers.Adam):
    """Of the user's."""


def test_others_load_their_file() -> None:
    assert is_whole(network())
    assert not is_whole(network(Own()))
    assert not is_whole(network(optimizer=OwnAdam()))
    assert not is_whole(network(width=400))  # large
    means = layers.Normalization(axis=-1)
    means.adapt(np.arange(8.0).reshape(1, 1, 8))
    normalized = network(means)
    assert not is_whole(normalized)  # Keras makes the mean that it subtracts of the variables
    kept = decode_model(encode_model(network(layers.Normalization(axis=-1))))
    restore_state(kept, encode_model(normalized))
    np.testing.assert_allclose(
        *(m.predict(X[:4], verbose=0) for m in (kept, normalized)), atol=1e-6
    )


def test_keras_finds_what_it_leaves_out_of_a_file() -> None:
    encode_model(network())
    for kind in ("Layer", "Functional", "Sequential", "Metric", "Optimizer"):
        assert saving_lib.get_attr_skipset(kind) is saving_lib.get_attr_skipset(kind)
