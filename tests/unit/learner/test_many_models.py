"""Many models in one process: each compiles functions of its own, and TensorFlow says nothing."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest

from sparkdl.learner import make_learner
from sparkdl.learner.cache import cached_predictor
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.training.learning import BatchStack


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's warning")
def test_many_models_are_no_retracing(caplog: pytest.LogCaptureFixture) -> None:
    """Before, the fifth fit of a process warned that a function was traced five times."""
    logging.getLogger("tensorflow").addHandler(caplog.handler)
    try:
        for units in range(2, 9):
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(units)])
            model.compile("adam", "mse")
            learner = make_learner(model)
            flat = np.empty(learner.layout.size, np.float32)
            learner.read_weights(flat)
            source = KerasSource(model)
            with cached_predictor(source.encode(list(source.signature.outputs))) as predictor:
                x = {next(iter(source.signature.inputs)): np.ones((8, 4), np.float32)}
                (given,) = predictor.predict(x, 8).values()
            np.testing.assert_allclose(given, model(np.ones((8, 4))), atol=1e-6)
    finally:
        logging.getLogger("tensorflow").removeHandler(caplog.handler)
    assert "retracing" not in caplog.text


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's graphs")
@pytest.mark.parametrize("jit", [False, True])
def test_stacks_of_any_number_of_batches_share_what_is_compiled(jit: bool) -> None:
    """Only a smaller last batch is traced anew: the first fit of a model pays for each."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=jit)
    traced, step = [0], model.train_step

    def counted(data: object) -> object:
        traced[0] += 1
        return step(data)

    model.train_step = counted
    learner = make_learner(model)
    for batches, rows in ((4, 8), (2, 8), (3, 8), (1, 3), (1, 5)):
        x, y = np.ones((batches, rows, 4), np.float32), np.ones((batches, rows), np.float32)
        learner.train(BatchStack({"x": x}, {"y": y}, None, batches, batches * rows))
    assert traced[0] == 2
