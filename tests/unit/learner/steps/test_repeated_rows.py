"""What a batch and its rows repeated say of a loss: sums and means that are known beforehand."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest

from sparkdl.errors import ModelError
from sparkdl.learner.steps.repeated_rows import has_own_loss, sums_stay
from sparkdl.training.learning import BatchStack

STACK = BatchStack({"x": np.arange(1, 6, dtype=np.float32)[None]}, {}, None, 1, 5)


def gradient_of(of_sum, of_mean=0.0, of_pairs=0.0):
    """Of a loss with one term of Keras, a sum: ``of_sum`` says what code of the user's makes of it
    for so many rows; and of a mean and of a product of rows, which nobody tells of."""

    def gradient(stack, factors):
        x = stack.x["x"].ravel()
        factor = 1.0 if factors is None else float(factors[0])
        known = factor * of_sum(len(x)) * x.sum()
        return np.array([known + of_mean * x.mean(), of_pairs * x.sum() ** 2], np.float32)

    return gradient


def model():
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_a_sum_stays_a_sum():
    assert sums_stay(gradient_of(lambda rows: 1.0), STACK, [False], model())


def test_a_sum_beside_a_mean_stays_a_sum():
    assert sums_stay(gradient_of(lambda rows: 1.0, of_mean=3.0), STACK, [False], model())


def test_a_sum_that_is_divided_by_the_rows_is_a_mean():
    assert not sums_stay(gradient_of(lambda rows: 1 / rows, of_mean=3.0), STACK, [False], model())


def test_a_sum_that_nobody_tells_of_is_refused():
    with pytest.raises(ModelError, match="no mean over the rows"):
        sums_stay(gradient_of(lambda rows: 1.0), STACK, [], model())


def test_a_sum_and_a_mean_that_nobody_tells_of_are_refused():
    with pytest.raises(ModelError, match="no mean over the rows"):
        sums_stay(gradient_of(lambda rows: 1.0, of_mean=3.0), STACK, [], model())


def test_what_compares_rows_with_each_other_is_left_as_it_is():
    assert sums_stay(gradient_of(lambda rows: 1.0, of_pairs=1.0), STACK, [], model())


def test_rows_are_not_changed():
    before = STACK.x["x"].copy()
    sums_stay(gradient_of(lambda rows: 1.0), STACK, [False], model())
    assert np.array_equal(STACK.x["x"], before)


class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.square(y_true - y_pred)


class Adding(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


@pytest.mark.parametrize(
    "loss", ["mse", keras.losses.Huber(reduction="sum"), keras.losses.mean_squared_error]
)
def test_losses_of_keras_are_not_asked(loss):
    made = model()
    made.compile("sgd", loss)
    assert not has_own_loss(made)


@pytest.mark.parametrize("loss", [OwnLoss(), lambda y, p: keras.ops.sum(y - p)])
def test_losses_of_the_users_own_are_asked(loss):
    made = model()
    made.compile("sgd", loss)
    assert has_own_loss(made)


def test_layers_of_the_users_own_that_add_losses_are_asked():
    made = keras.Sequential([keras.Input((1,)), Adding(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    assert has_own_loss(made)


def test_other_threads_draw_meanwhile_and_all_do_afterwards():
    """Two ranks in threads, of which the first to look is the last to be through."""
    ones, layer = np.ones((1, 1000), np.float32), keras.layers.Dropout(0.5)

    def kept():
        return float(np.mean(keras.ops.convert_to_numpy(layer(ones, training=True)) == 1.0))

    first_looks, second_is_through = threading.Event(), threading.Event()
    seen = {}

    def looks(stack, factors):
        seen.setdefault("first", kept())
        first_looks.set()
        assert second_is_through.wait(20)
        return gradient_of(lambda rows: 1.0)(stack, factors)

    first = threading.Thread(target=sums_stay, args=(looks, STACK, [False], model()))
    first.start()
    assert first_looks.wait(20)
    seen["beside"] = kept()
    sums_stay(gradient_of(lambda rows: 1.0), STACK, [False], model())
    second_is_through.set()
    first.join(20)
    assert seen == {"first": 1.0, "beside": 0.0}
    assert kept() == 0.0  # the kept half is scaled: no value stays 1
