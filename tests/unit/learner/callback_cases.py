"""What callbacks write on the driver, found there and written on a worker; run per backend."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from learner_cases import classes, close, dense_model, train_all, weights_of

from sparkdl.errors import ModelError
from sparkdl.learner import make_learner
from sparkdl.learner.callback_sink import WriteWatch
from sparkdl.learner.state.model_weights import read_model
from sparkdl.training.changes import VariableChanges


def write(model):
    """A callback of every kind: weights, statistics, a part of the optimizer's state."""
    first = model.layers[0]
    first.set_weights([np.clip(w, -0.05, 0.05) for w in first.get_weights()])
    norm = next(layer for layer in model.layers if "normalization" in layer.name)
    norm.moving_mean.assign(norm.moving_mean * 0.5)
    model.optimizer.iterations.assign(7)
    momentum = next(v for v in model.optimizer.variables if "momentum" in v.path)
    momentum.assign(np.zeros(momentum.shape))
    model.optimizer.learning_rate = 0.25  # travels by itself


def test_a_worker_trains_on_with_what_callbacks_wrote():
    x, y = classes(24)
    driver, plain = dense_model("adam", norm=True), dense_model("adam", norm=True)
    worker = make_learner(dense_model("adam", norm=True))
    driver.optimizer.build(driver.trainable_variables)
    watch = WriteWatch(driver)
    watch.begin()
    assert not watch.found()
    train_all(worker, x, y, 8, 2)
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    driver.set_weights(plain.get_weights())  # what the driver loads at an epoch's end
    for mine, other in zip(driver.optimizer.variables, plain.optimizer.variables, strict=True):
        mine.assign(other.numpy())
    watch.look()
    write(driver)
    write(plain)
    changes = watch.found()
    layout = worker.layout
    flat = read_model(driver, layout)
    assert flat.size  # what lies in the buffer is said with its place there
    written = np.full(layout.size, np.nan, np.float32)
    changes.write_into(written)
    known = ~np.isnan(written)
    assert known.any()
    assert not known.all()
    np.testing.assert_array_equal(written[known], flat[known])
    worker.take_changes(VariableChanges.from_bytes(changes.to_bytes()))
    worker.optimizer.set_learning_rate(0.25)
    close(weights_of(worker), flat)
    assert worker.optimizer.step == 7
    train_all(worker, x, y, 8, 2)
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    close(weights_of(worker), read_model(plain, layout), 1e-4)
    assert not watch.found()


def test_seeds_and_the_learning_rate_are_not_sent():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watch = WriteWatch(model)
    watch.begin()
    model(np.ones((2, 4), "float32"), training=True)
    model.optimizer.learning_rate = 0.5
    assert not watch.found()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.layers[0].__setattr__("trainable", False), "which variables are trainable"),
        (lambda m: m.optimizer.__setattr__("clipnorm", 0.01), "settings of the optimizer"),
        (lambda m: m.add(keras.layers.Dense(2)), "the layers"),
        (lambda m: m.compile("adam", "mse"), "the optimizer"),
    ],
)
def test_a_part_that_changes_is_an_error(change, named):
    model = dense_model()
    watch = WriteWatch(model)
    watch.begin()
    change(model)
    with pytest.raises(ModelError, match=named):
        watch.found()


def test_a_worker_with_another_model_says_so():
    learner = make_learner(dense_model())
    with pytest.raises(ModelError, match="does not have"):
        learner.take_changes(VariableChanges({0: np.zeros(3)}))
