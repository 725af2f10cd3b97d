"""Many models in one process: each compiles functions of its own, and TensorFlow says nothing."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest

from sparkdl.learner import make_learner
from sparkdl.learner.cache import cached_predictor
from sparkdl.learner.prediction.model_source import KerasSource


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
