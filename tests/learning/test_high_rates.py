"""Two workers that do not wait, at a learning rate at which their changes add up to too much."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness import run_workers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import high_rates

from sparkdl.rules import Downpour

ROWS, EPOCHS, BATCH, WINDOW = 6_000, 3, 32, 12


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


def mean_loss(learners: list[Any]) -> float:
    """Of the last epoch, while the workers trained: the first metric is the loss, sum and count."""
    states = np.array([learner.metrics.state()[:2] for learner in learners])
    total, count = states.sum(0)
    return float(total / count)


def test_two_workers_at_a_high_rate_reach_the_loss_of_plain_keras() -> None:
    """By the mean of the last epoch: the loss after it says little at such a rate.

    After the last step plain Keras has 0.17 to 0.25, two workers on a busy machine 0.07 to 0.28.
    """
    plain, trained = [], []
    for seed in range(1, 6):
        x, y = data(seed)
        history = make_model(seed).fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        plain.append(history.history["loss"][-1])
        result = run_workers(
            lambda seed=seed: make_model(seed), [(x[r::2], y[r::2]) for r in range(2)], Downpour(),
            epochs=EPOCHS, batch_size=BATCH, window=WINDOW, shuffle=True,
        )  # fmt: skip
        trained.append(mean_loss(result.learners))
    # 0.67 here and 0.76 beside five busy loops; changes that count in full have 0.97
    assert np.mean(trained) <= 0.9 * np.mean(plain), (trained, plain)


@pytest.mark.slow
def test_inputs_that_are_not_centered_cost_two_workers_a_tenth() -> None:
    """The mean loss of the third epoch over that of one process, five seeds, on a simulated clock.

    Changes that count in full have 1.19; 1.05 is out of reach (ADR 0061).
    """
    problem = high_rates.PROBLEMS["not centered, SGD 0.1"]
    runs = [high_rates.Simulated(problem, 60_000, 3, seed) for seed in range(5)]
    ratios = [run.workers(2, 16, True)[0] / run.alone() for run in runs]
    assert np.mean(ratios) <= 1.11, ratios  # 1.100 (1.042 to 1.147): the same on any machine
