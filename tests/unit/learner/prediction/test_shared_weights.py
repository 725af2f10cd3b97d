"""Weights that several processes of an executor map: equal bits, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.learner import cache
from sparkdl.learner.archives.archive import decode_model, encode_model, restore_state
from sparkdl.learner.prediction import shared_weights
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.learner.prediction.shared_weights import SharedWeights

X = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")


def network(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(7, "tanh"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3, dtype="float64")])


def test_variables_alias_a_file_of_this_user_alone(tmp_path: Path) -> None:
    one, two = network(0), network(0)
    expected = one.predict(X, verbose=0)
    first = SharedWeights(one.weights, str(tmp_path), "of-the-model")
    (folder,) = tmp_path.iterdir()
    second = SharedWeights(two.weights, str(tmp_path), "of-the-model")
    assert list(tmp_path.iterdir()) == [folder]
    for path, mode in ((folder, 0o700), (folder / "weights", 0o600)):
        assert stat.S_IMODE(os.stat(path).st_mode) == mode
    for model in (one, two):
        np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    content = (folder / "weights").read_bytes()
    two.layers[0].kernel.assign(np.zeros((5, 7)))
    two.layers[1].gamma.assign_add(np.ones(7))
    np.testing.assert_array_equal(one.predict(X, verbose=0), expected)
    assert (folder / "weights").read_bytes() == content
    first.close()
    assert folder.exists()  # the second uses it
    second.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(one.predict(X, verbose=0), expected)


def test_a_file_that_was_left_half_written_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "sparkdl-weights-of-the-model"
    folder.mkdir(mode=0o700)
    (folder / "weights.part").write_bytes(b"half")  # its process was killed
    model = network(0)
    expected = model.predict(X, verbose=0)
    SharedWeights(model.weights, str(tmp_path), "of-the-model").close()
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    assert not folder.exists()


def test_predictors_share_large_weights_on_executors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "blockmgr-1"
    home.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{home},/elsewhere")

    def predicted(model: Any) -> Any:
        source = KerasSource(model)
        with cache.cached_predictor(source.encode(list(source.signature.outputs))) as predictor:
            (values,) = predictor.predict({"x": X}, 8).values()
        return values

    models = [network(seed) for seed in range(4)]
    expected = [model.predict(X, verbose=0) for model in models]
    np.testing.assert_array_equal(predicted(models[3]), expected[3])
    assert list(home.iterdir()) == []  # a small model
    monkeypatch.setattr(shared_weights, "LEAST_BYTES", 1)
    for model, values in zip(models[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(predicted(model), values)
    assert 1 <= len(list(home.iterdir())) <= 2  # as many as predictors are kept
    for kept in cache._predictors.values():
        kept.close()
    assert list(home.iterdir()) == []


class Unsaved(keras.layers.Layer):  # type: ignore[misc]
    """A layer that writes nothing into a file: its value is that of its initializer."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(600, 600), initializer="identity", name="scale")
        self.seen = float(keras.ops.max(self.scale.value))
        self.given = keras.Variable(np.full((600, 600), 0.5, "float32"), trainable=False)

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.scale * self.given)

    def save_own_variables(self, store: Any) -> None:
        pass

    def load_own_variables(self, store: Any) -> None:
        pass


@pytest.mark.parametrize("compiled", [False, True])
def test_large_values_of_a_file_are_those_of_the_model(compiled: bool) -> None:
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(600, dtype="mixed_bfloat16")
    dense.build((None, 600))
    dense.enable_lora(2)
    layers = [keras.layers.Dense(600), dense, Unsaved(), keras.layers.Dense(1)]
    layers.insert(1, keras.layers.Dense(1200, dtype="bfloat16"))
    layers.insert(2, keras.layers.Dense(600, dtype="bfloat16", use_bias=False))
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
    y = X[:, :1]
    model.fit(X, y, verbose=0)
    archive = encode_model(model)
    with shared_weights.sparing_memory():
        made = decode_model(archive, compiled=compiled)
    assert made.layers[4].seen == 1.0, "what is computed of an initial value is computed of it"
    np.testing.assert_array_equal(made.predict(X, verbose=0), model.predict(X, verbose=0))
    assert [v.dtype for v in made.variables] == [v.dtype for v in model.variables]
    if not compiled:
        made.compile(keras.optimizers.Adam(0.01), "mse")
        made.fit(X, y, verbose=0)
        return
    for each in (model, made):
        each.fit(X, y, verbose=0, epochs=2, shuffle=False)
    pairs = zip(model.optimizer.variables, made.optimizer.variables, strict=True)
    for one, other in (*pairs, *zip(model.weights, made.weights, strict=True)):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)
    again = encode_model(model)
    with shared_weights.sparing_memory():
        restore_state(made, again)
    np.testing.assert_array_equal(made.layers[0].kernel.numpy(), model.layers[0].kernel.numpy())


def test_a_value_that_no_file_has_is_that_of_its_initializer() -> None:
    """The optimizer is made before the file is read, and trains the variable afterwards."""
    layers = [keras.layers.Dense(600), Unsaved(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile("sgd", "mse")
    archive = replace(encode_model(model), values={})
    with shared_weights.sparing_memory():
        made = decode_model(archive)
    np.testing.assert_array_equal(made.layers[1].scale.numpy(), np.eye(600))
    made.fit(X, X[:, :1], verbose=0)
    assert np.any(made.layers[1].scale.numpy() != np.eye(600))


def test_two_threads_that_load_leave_keras_as_it_was() -> None:
    from keras.src.backend.tensorflow.core import Variable
    from keras.src.saving import saving_lib

    places = ((Variable, "_direct_assign"), (saving_lib, "is_memory_sufficient"))
    before = [getattr(place, name) for place, name in places]
    inside = threading.Barrier(2, timeout=0.5)

    def load() -> None:
        with shared_weights.sparing_memory(), contextlib.suppress(threading.BrokenBarrierError):
            inside.wait()  # one at a time

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(load) for _ in range(2)]:
            done.result()
    assert [getattr(place, name) for place, name in places] == before
