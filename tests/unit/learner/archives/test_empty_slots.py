"""An optimizer's slots that are still 0 do not travel, and are 0 where the model arrives."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.learner.archives.archive import decode_model, encode_model, restore_state

pytestmark = pytest.mark.keras

X = np.random.default_rng(0).normal(size=(4, 1200)).astype("float32")


def network(optimizer: Any = "adam", width: int = 1200) -> Any:
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1000)])
    model.compile(optimizer, "mse")
    return model


def values(model: Any) -> list[np.ndarray]:
    return [
        keras.ops.convert_to_numpy(v.value) for v in (*model.variables, *model.optimizer.variables)
    ]


def test_slots_that_are_0_stay_at_home() -> None:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        archive = encode_model(model)
        copy = decode_model(archive)
    assert len(archive.content) < 1.2 * 4 * model.count_params()
    for mine, its in zip(values(model), values(copy), strict=True):
        np.testing.assert_array_equal(mine, its)
    model.fit(X, X[:, :1000], verbose=0)
    trained = encode_model(model)
    assert len(trained.content) > 3 * 4 * model.count_params()
    copy.fit(X, X[:, :1000], verbose=0)
    for mine, its in zip(values(decode_model(trained)), values(copy), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-6)
    restore_state(copy, archive)  # as a kept learner gets a new model
    for mine, its in zip(values(decode_model(archive)), values(copy), strict=True):
        np.testing.assert_array_equal(mine, its)


class Own(keras.optimizers.SGD):
    """Of the user's."""


@pytest.mark.parametrize(
    "optimizer",
    [
        "adagrad",  # whose slots begin with .1
        Own(0.1, momentum=0.9),
        keras.optimizers.SGD(0.1),  # has none
    ],
)
def test_other_optimizers_travel_whole(optimizer: Any) -> None:
    model = network(optimizer)
    archive = encode_model(model)
    for mine, its in zip(values(model), values(decode_model(archive)), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("width", [8, 1200])
def test_slots_are_0_again_in_a_kept_model(width: int) -> None:
    """Also where values come beside the file, in which one 0 stands for many."""
    model, kept = network(width=width), network(width=width)
    archive = encode_model(model, for_worker=True)
    kept.fit(X[:, :width], X[:, :1000], verbose=0)
    restore_state(kept, archive)
    for mine, its in zip(values(model), values(kept), strict=True):
        np.testing.assert_array_equal(mine, its)
    sent = sum(value.size for value in archive.values.values())
    assert sent < 1.2 * model.count_params() + 4096
