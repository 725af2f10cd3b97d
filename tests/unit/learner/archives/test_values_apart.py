"""What a fit sends of a large model: values beside a file without them, or by a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.saving.saving_lib import H5IOStore

from sparkdl.learner.archives.archive import decode_model, encode_model, restore_state
from sparkdl.learner.archives.rebuilt import values_left_out
from sparkdl.learner.state.carried_state import is_zero, names_in_buffer
from sparkdl.learner.state.model_weights import model_layout, read_model, write_model
from sparkdl.process import payload

pytestmark = pytest.mark.keras

X, Y = np.random.default_rng(0).normal(size=(2, 32, 8)).astype("float32")
LARGE = 400
"""Units of which a kernel has more elements than a model whose values always travel."""


class Own(layers.Layer):
    """May keep more than its variables."""

    def call(self, x: Any) -> Any:
        return x


def network(*more: Any, seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([
        keras.Input((8,)), layers.Dense(LARGE), *more, layers.BatchNormalization(),
        layers.Dense(LARGE, trainable=False), layers.Dropout(0.3),
        layers.Dense(LARGE, dtype="float64"), layers.Dense(8),
    ])  # fmt: skip
    model.compile("adam", "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def trained(*more: Any) -> Any:
    model = network(*more)
    model.fit(X, Y, verbose=0)
    return model


def values(model: Any) -> list[np.ndarray]:
    found = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v.value)) for v in found]


def require_equal(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for mine, its in zip(one, other, strict=True):
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("make", [network, trained])
def test_a_worker_gets_every_value_without_the_file(make: Any) -> None:
    model = make()
    wanted, write = values(model), H5IOStore.__setitem__
    archive = encode_model(model, for_worker=True)
    assert H5IOStore.__setitem__ is write
    assert len(archive.content) < 4 * LARGE * LARGE < len(encode_model(model).content)
    model.fit(X, Y, verbose=0)  # what is sent stays as it was
    sent = payload.load(payload.dump(archive))
    copy = decode_model(sent)
    require_equal(values(copy), wanted)
    copy.fit(X, Y, verbose=0)
    with patch.object(keras.Model, "load_weights", side_effect=AssertionError("its file")):
        restore_state(copy, archive)
    require_equal(values(copy), wanted)
    sent.forget_content()
    assert not sent.values


def test_a_large_array_of_minus_zero_keeps_its_sign() -> None:
    model = network()
    model.layers[0].kernel.assign(np.full((8, LARGE), -0.0))
    copy = decode_model(encode_model(model))
    assert np.signbit(copy.layers[0].kernel.numpy()).all()
    assert not is_zero(np.full(9, -0.0))
    assert is_zero(np.zeros((3, 3), "float32")[:, ::2])


def test_values_that_a_server_has_do_not_travel() -> None:
    model = trained()
    wanted, center = values(model), read_model(model, model_layout(model))
    archive = encode_model(model, for_worker=True)
    known = names_in_buffer(model)
    left = {name: value for name, value in archive.values.items() if name not in known}
    shapes = [value.shape for name, value in left.items() if name.startswith("model")]
    assert shapes.count((LARGE, LARGE)) == 2  # what is frozen, and float64
    assert (8, LARGE) not in shapes
    copy = decode_model(replace(archive, values=left))
    write_model(copy, model_layout(copy), center)
    require_equal(values(copy), wanted)


def test_another_thread_saves_its_model_whole_meanwhile(tmp_path: Path) -> None:
    other, path = trained(), str(tmp_path / "other.keras")
    with values_left_out(network(), wanted=True), ThreadPoolExecutor(1) as thread:
        thread.submit(other.save, path).result()
    loaded = keras.models.load_model(path)  # whose seeds Keras does not save
    require_equal(loaded.get_weights(), other.get_weights())


def test_a_layer_of_the_users_own_has_its_values_in_the_file() -> None:
    model = trained(Own())
    archive = encode_model(model, for_worker=True)
    assert len(archive.content) > 4 * LARGE * LARGE
    assert all(value.size <= 4096 for value in archive.values.values())
    require_equal(values(decode_model(archive)), values(model))
