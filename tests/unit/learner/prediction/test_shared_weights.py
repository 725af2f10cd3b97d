"""Weights that several processes of an executor map: equal bits, and nothing left behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.learner import cache
from sparkdl.learner.prediction import shared_weights
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.learner.prediction.shared_weights import SharedWeights, executor_folder

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
    assert executor_folder() is None
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
