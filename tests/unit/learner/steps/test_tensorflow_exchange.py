"""What Horovod's operations are given inside a compiled step, with equal ranks in their place."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from sparkdl.learner import make_learner
from sparkdl.learner.steps import tensorflow
from sparkdl.learner.steps.tensorflow_exchange import HorovodExchange
from sparkdl.training.learning import BatchStack
from sparkdl.weights import Layout

RANKS = 3


@pytest.fixture
def equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod, as if all ranks had the same numbers: sums in the dtype that travels."""

    def grouped_allreduce(tensors: list[Any], **options: Any) -> list[Any]:
        return [tf.add_n([t] * RANKS) for t in tensors]

    module = ModuleType("horovod.tensorflow")
    module.Sum = "sum"  # type: ignore[attr-defined]
    module.grouped_allreduce = grouped_allreduce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", module)


@pytest.mark.usefixtures("equal_ranks")
def test_what_is_finite_stays_so_in_half_precision_and_an_infinity_stays_one() -> None:
    layout = Layout.of([("a", (5,), "float32")])
    exchange = HorovodExchange(layout, "float16", [slice(0, 5)], checks=False)
    gradient = tf.constant([1e6, -1e6, 2.0, np.inf, np.nan])
    (joined,) = exchange([gradient], tf.constant(1.0), tf.constant(0.0)).values
    np.testing.assert_allclose(joined, [64000, -64000, 2, np.inf, np.nan], rtol=1e-3)


@pytest.mark.parametrize("eager", [False, True])
def test_a_large_model_is_read_and_written_variable_by_variable(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients (of one variable there is none), statistics and weights are those of a small."""
    x = np.random.default_rng(0).normal(size=(1, 8, 4)).astype("float32")
    batch = BatchStack({"features": x}, {"label": x[:, :, :1]}, None, 1, 8)
    flats = []
    for least in (1 << 40, 1):
        monkeypatch.setattr(tensorflow, "LARGE_BYTES", least)
        keras.utils.set_random_seed(1)
        given = keras.Input((4,))
        normed = keras.layers.BatchNormalization()(keras.layers.Dense(3)(given))
        model = keras.Model(given, keras.layers.Dense(1)(normed))
        model.add_weight(shape=(2,), name="without_gradient")
        model.compile("sgd", "mse", run_eagerly=eager)
        learner = make_learner(model)
        gradient = np.empty(learner.layout.size, np.float32)
        learner.gradients(batch, gradient)
        weights = np.empty_like(gradient)
        learner.read_weights(weights)
        given_weights = weights + np.arange(weights.size, dtype=np.float32)
        learner.write_weights(given_weights)
        given_weights[:] = np.nan  # the buffer is the caller's again
        learner.read_weights(weights)
        flats.append((gradient, weights))
    for small, large in zip(*flats, strict=True):
        np.testing.assert_array_equal(small, large)
    assert np.isfinite(flats[1][1]).all()
    assert np.count_nonzero(flats[1][0])
