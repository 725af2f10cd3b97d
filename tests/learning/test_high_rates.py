"""Two workers that do not wait, at a learning rate at which their changes add up to too much."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from harness import run_workers

from sparkdl.learner.model_weights import write_model
from sparkdl.ps.rules import Downpour

ROWS, EPOCHS, BATCH, WINDOW = 6_000, 3, 32, 5


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes of a linear teacher without noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, 100), np.float32)
    return x, (x @ rng.standard_normal((100, 5)).astype(np.float32)).argmax(1)


def make_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((100,)), *hidden, keras.layers.Dense(5, "softmax")])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def test_two_workers_at_a_high_rate_reach_the_loss_of_plain_keras() -> None:
    plain, trained = [], []
    for seed in (1, 2, 3):
        x, y = data(seed)
        model = make_model(seed)
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        plain.append(model.evaluate(x, y, batch_size=1000, verbose=0))
        result = run_workers(
            lambda seed=seed: make_model(seed), [(x[r::2], y[r::2]) for r in range(2)], Downpour(),
            epochs=EPOCHS, batch_size=BATCH, window=WINDOW, shuffle=True,
        )  # fmt: skip
        write_model(model, result.layout, result.center)
        trained.append(model.evaluate(x, y, batch_size=1000, verbose=0))
    assert np.mean(trained) <= 1.05 * np.mean(plain)
