"""Gradients that overflow on the way in half precision: the loss scale hears of it."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
from harness import run_workers, split

from sparkdl.codecs import make_codec
from sparkdl.collective.choice import optimizer_config
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.rule_synchronizer import RuleSynchronizer
from sparkdl.collective.rules import make_rule
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.learner import make_learner
from sparkdl.rules import BSP
from sparkdl.testing.inproc import connect_threads
from sparkdl.worker import train

BATCH, SCALE = 8, 32768.0


def make_model() -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.05)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE), "mae")
    return model


def data() -> list[tuple[np.ndarray, np.ndarray]]:
    """Two batches each for two workers; one number of the second worker's first is too large."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * BATCH, 5)).astype("float32")
    y = x.sum(1, keepdims=True)
    parts = split(x, y, [2 * BATCH, 2 * BATCH])
    parts[1][0][3, 2] = np.float32(3e38)  # times the scale this is infinite
    return parts


def synchronous() -> list[Any]:
    return run_workers(make_model, data(), BSP(), batch_size=BATCH, codec=make_codec("fp16")).models


def allreduce(rule: str | None = None) -> list[Any]:
    models = [make_model() for _ in range(2)]

    def work(communicator: Any) -> None:
        learner = make_learner(models[communicator.rank])
        steps: Any = AllReduceGradientSynchronizer(communicator, learner.layout, wire="float16")
        if rule is not None:
            bound = make_rule(rule).bind(2, optimizer_config(learner.model.optimizer))
            steps = RuleSynchronizer(communicator, learner.layout, bound)
        synchronizer = AllReduceSynchronizer(communicator, learner.layout, steps=steps)
        rows = rows_from_numpy(*data()[communicator.rank])
        batches = Batches(rows, BATCH, shuffle=False, rank=communicator.rank)
        settings = LoopSettings(epochs=1, batch_size=BATCH, window=1, shuffle=False)
        with communicator:
            train(learner, synchronizer, batches, settings, num_rows=len(rows), num_workers=2)

    threads = [threading.Thread(target=work, args=(c,)) for c in connect_threads(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return models


def sliced() -> list[Any]:
    return allreduce("sliced")


@pytest.mark.parametrize("run", [synchronous, allreduce, sliced])
def test_an_overflow_halves_the_scale_and_takes_no_step(run: Any) -> None:
    second = [
        np.concatenate(arrays)
        for arrays in zip(*((x[BATCH:], y[BATCH:]) for x, y in data()), strict=True)
    ]
    alone = make_model()
    alone.optimizer.build(alone.trainable_variables)
    alone.optimizer.dynamic_scale.assign(SCALE / 2)
    before = alone.get_weights()
    alone.train_on_batch(*second)
    moved = max(
        float(np.abs(a - b).max()) for a, b in zip(alone.get_weights(), before, strict=True)
    )
    assert moved > 1e-2
    for model in run():
        assert float(model.optimizer.dynamic_scale.numpy()) == SCALE / 2
        for value, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(value, expected, atol=1e-3)
