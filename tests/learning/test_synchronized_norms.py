"""``BatchNormalization(synchronized=True)`` in rounds: one process on the global batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from harness import global_batches, run_workers, split

from sparkdl.rules import BSP

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="Keras has the argument on TensorFlow alone"
)
BATCH = 8


def make() -> Any:
    keras.utils.set_random_seed(3)
    norms = [keras.layers.BatchNormalization(synchronized=True, momentum=0.5) for _ in range(2)]
    inner = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "relu"), norms[1]])
    model = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(16), norms[0], inner, keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@pytest.mark.parametrize("sizes", [[40, 40], [43, 17], [40, 0]], ids=str)
def test_weights_and_statistics_are_those_of_the_global_batch(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), 12)).astype("float32")
    x += np.repeat([0.0, 2.0], sizes)[:, None].astype("float32")  # workers differ
    parts = split(x, x[:, :1] * x[:, 1:2], sizes)
    result = run_workers(make, parts, BSP(), epochs=2, batch_size=BATCH)
    expected = make()
    for _ in range(2):
        for batch in global_batches(parts, BATCH):
            expected.train_on_batch(*batch)
    for learner, model in zip(result.learners, result.models, strict=True):
        learner.sync_model()
        for found, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
