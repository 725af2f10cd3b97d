"""Models with a ``train_step`` of their own and no compiled loss; run once per Keras backend."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from learner_cases import BACKEND, JIT, close, copy_of, stacks, train_all, weights_of

from sparkdl.errors import ModelError
from sparkdl.learner import make_learner
from sparkdl.learner.checks.compile_parts import require_evaluable, require_loadable
from sparkdl.learner.signature import model_signature
from sparkdl.learner.state.metric_state import metric_results
from sparkdl.learner.state.model_weights import read_model
from sparkdl.learner.steps.keras_learner import require_compiled
from sparkdl.training.learning import BatchStack

layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(3)


class OwnStep(keras.Model):
    """The mean squared error of its own, as the guides of Keras write a ``train_step``."""

    def __init__(self, units=1, **kwargs):
        super().__init__(**kwargs)
        self.out = layers.Dense(units)

    def build(self, shape):
        self.out.build(shape)
        self.built = True

    def call(self, x):
        return self.out(x)

    def get_config(self):
        return {**super().get_config(), "units": self.out.units}

    def read(self, data):
        x, y = data  # two parts, no more
        return x, y

    def loss_of(self, predicted, y):
        return ops.mean((predicted - y) ** 2)

    def track(self, loss, x):
        return {"loss": loss}

    if BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y = self.read(data)
            with tf.GradientTape() as tape:
                loss = self.loss_of(self(x, training=True), y)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.track(loss, x)

        def test_step(self, data):
            x, y = self.read(data)
            return self.track(self.loss_of(self(x), y), x)

    elif BACKEND == "torch":

        def train_step(self, data):
            import torch

            x, y = self.read(data)
            self.zero_grad()
            loss = self.loss_of(self(x, training=True), y)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply(
                    [v.value.grad for v in self.trainable_weights], self.trainable_weights
                )
            return self.track(loss.detach(), x)

        def test_step(self, data):
            x, y = self.read(data)
            return self.track(self.loss_of(self(x), y), x)

    else:

        def train_step(self, state, data):
            import jax

            trainable, non_trainable, optimizer, metrics = state
            x, y = self.read(data)

            def loss_of(trainable):
                predicted, after = self.stateless_call(trainable, non_trainable, x)
                return self.loss_of(predicted, y), after

            (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            logs, metrics = self.stateless_track(metrics, loss, x)
            return logs, (trainable, after, optimizer, metrics)

        def test_step(self, state, data):
            trainable, non_trainable, metrics = state
            x, y = self.read(data)
            predicted, after = self.stateless_call(trainable, non_trainable, x)
            logs, metrics = self.stateless_track(metrics, self.loss_of(predicted, y), x)
            return logs, (trainable, after, metrics)

        def stateless_track(self, metrics, loss, x):
            return {"loss": loss}, metrics


class Tracked(OwnStep):
    """Keeps the loss in a metric of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.tracker]

    def track(self, loss, x):
        self.tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        return {"loss": self.tracker.result()}

    def stateless_track(self, metrics, loss, x):
        metrics = self.tracker.stateless_update_state(metrics, loss, sample_weight=x.shape[0])
        return {"loss": self.tracker.stateless_result(metrics)}, list(metrics)


class WithoutLabels(OwnStep):
    """Reconstructs its input."""

    def read(self, data):
        return data, data


def made(kind, inputs=3, **options):
    keras.utils.set_random_seed(5)
    model = kind(**options)
    model.build((None, inputs))
    model.compile(keras.optimizers.SGD(0.05), jit_compile=JIT)
    return model


def data(rows=22):
    x = RNG.normal(size=(rows, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


@pytest.mark.parametrize("kind", [OwnStep, Tracked])
def test_a_step_that_takes_x_and_y_trains_as_in_keras(kind):
    x, y = data()
    model = made(kind)
    for check in (require_compiled, require_loadable, require_evaluable):
        check(model)
    assert model_signature(model).label_kinds == {"output": "own"}
    assert not model_signature(model).needs_labels
    learner = make_learner(copy_of(model))
    losses, rows = [], []
    for stack in stacks(x, y, 4, 1):  # the loss of a batch before its step
        losses.append(metric_results(model, learner.evaluate([stack]))["loss"])
        rows.append(stack.num_rows)
        learner.train(stack)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    close(weights_of(learner), read_model(model, learner.layout))
    told = metric_results(model, learner.metrics.state())
    assert set(told) == {"loss"}
    close(told["loss"], np.average(losses, weights=rows), 1e-5)
    assert told["loss"] > 0


def test_gradients_are_those_of_the_own_loss():
    x, y = data(4)
    learner = make_learner(made(OwnStep))
    before = weights_of(learner)
    out = np.empty_like(before)
    learner.gradients(next(stacks(x, y, 4, 1)), out)
    assert metric_results(learner.model, learner.metrics.state())["loss"] > 0
    train_all(learner, x, y, 4, 1)
    close(weights_of(learner), before - 0.05 * out)


def test_a_step_without_labels_gets_the_inputs_alone():
    x, _ = data(16)
    model = made(WithoutLabels, units=3)
    learner = make_learner(copy_of(model))
    stack = BatchStack({"features": x.reshape(4, 4, 3)}, {}, None, 4, 16)
    learner.train(stack)
    model.fit(x, batch_size=4, shuffle=False, verbose=0)
    close(weights_of(learner), read_model(model, learner.layout))
    before = metric_results(learner.model, learner.evaluate([stack]))["loss"]
    close(before, np.mean((model.predict(x, verbose=0) - x) ** 2), 1e-5)


def test_what_cannot_be_evaluated_or_compiled_again_is_said():
    class Silent(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = layers.Dense(1)

        def build(self, shape):
            self.out.build(shape)
            self.built = True

        def call(self, x):
            return self.out(x)

        def train_step(self, data):
            raise NotImplementedError

    model = Silent()
    model.build((None, 3))
    model.compile("sgd")
    require_compiled(model)
    with pytest.raises(ModelError, match="test_step of the model's own"):
        require_evaluable(model)

    class TwoOptimizers(OwnStep):
        def compile(self, first, second):
            super().compile(first)
            self.second = second

    with pytest.raises(ModelError, match="compile_from_config"):
        require_loadable(TwoOptimizers())
