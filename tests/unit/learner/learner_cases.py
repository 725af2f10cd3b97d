"""Cases with known answers for a learner, run once per Keras backend by test_learner_*.py.

Keras fixes its backend when it is imported, so each backend runs in a process of its own.
"""

from __future__ import annotations

import io
import threading
import time

import keras
import numpy as np
import pytest

from sparkdl.errors import ConfigError, ModelError
from sparkdl.files.run_state import RunState
from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.cache import cached_learner, forget_learner
from sparkdl.learner.prediction.predictor import make_predictor
from sparkdl.learner.signature import model_signature
from sparkdl.learner.state.metric_state import metric_results
from sparkdl.learner.state.model_weights import model_layout, read_model, write_model
from sparkdl.training.learning import BatchStack

BACKEND = keras.backend.backend()
JIT = False if BACKEND == "tensorflow" else "auto"  # XLA compiles long; the learner needs none
SHIFT = 0.5
RNG = np.random.default_rng(7)
layers = keras.layers


# -- helpers -----------------------------------------------------------------------------------


def stacks(x, y, batch_size, most_batches, sample_weight=None):
    """The rows in order in stacks of batches, the smaller last batch as a stack of its own."""
    x, y = (a if isinstance(a, dict) else {n: a} for n, a in (("features", x), ("label", y)))
    if sample_weight is not None and not isinstance(sample_weight, dict):
        sample_weight = dict.fromkeys(y, sample_weight)
    rows = len(next(iter(x.values())))
    full = rows // batch_size
    cuts = [(i, min(most_batches, full - i), batch_size) for i in range(0, full, most_batches)]
    if rows % batch_size:
        cuts.append((full, 1, rows % batch_size))
    for first, count, size in cuts:
        start = first * batch_size

        def cut(arrays, start=start, count=count, size=size):
            return {
                k: a[start : start + count * size].reshape(count, size, *a.shape[1:])
                for k, a in arrays.items()
            }

        weight = None if sample_weight is None else cut(sample_weight)
        yield BatchStack(cut(x), cut(y), weight, count, count * size)


def classes(rows=30, features=4, num_classes=3):
    x = RNG.normal(size=(rows, features)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)
    return x, y % num_classes


def dense_model(optimizer="sgd", metrics=("accuracy",), norm=False, name=None, **kwargs):
    keras.utils.set_random_seed(1)
    middle = [layers.BatchNormalization(), layers.Dropout(0.0)] if norm else []
    first, last = (layers.Dense(5, "tanh", name="first"), layers.Dense(3, "softmax", name="last"))
    model = keras.Sequential([keras.Input((4,), name="in"), first, *middle, last], name=name)
    kwargs.setdefault("jit_compile", JIT)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=list(metrics), **kwargs)
    return model


def copy_of(model):
    return decode_model(encode_model(model))


def predict(learner, x, batch_size=16):
    """What the learner's model predicts with the weights that it has now."""
    learner.sync_model()
    return make_predictor(learner.model).predict(x, batch_size)


def weights_of(learner):
    flat = np.full(learner.layout.size, np.nan, np.float32)
    learner.read_weights(flat)
    return flat


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def train_all(learner, *args, **kwargs):
    for stack in stacks(*args, **kwargs):
        learner.train(stack)


def compare_with_fit(
    model, x, y, *, batch_size=8, most_batches=2, sample_weight=None, tolerance=1e-5
):
    """Trains by the learner and by ``model.fit`` and compares weights, statistics, metrics."""
    other = copy_of(model)
    learner = make_learner(other)
    for _ in range(2):
        learner.metrics.reset()
        train_all(learner, x, y, batch_size, most_batches, sample_weight)
    fit_x = next(iter(x.values())) if isinstance(x, dict) and len(x) == 1 else x
    history = model.fit(
        fit_x,
        y,
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
        sample_weight=sample_weight,
    ).history
    expected = read_model(model, model_layout(model))
    close(weights_of(learner), expected, tolerance)
    results = metric_results(other, learner.metrics.state())
    assert set(results) == set(history)
    for name, value in results.items():
        close(value, history[name][-1], max(tolerance, 1e-4))
    return learner


# -- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_training_equals_keras_fit(name):
    optimizer = {
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.05),
    }[name]()
    x, y = classes(30)  # 3 full batches of 8, in stacks of 2 and 1, and one of 6
    learner = compare_with_fit(dense_model(optimizer, norm=True), x, y)
    assert learner.optimizer.step == 8


def test_stacks_of_any_length_train_alike():
    x, y = classes(40)
    reference = None
    for most_batches in (1, 2, 5):
        learner = make_learner(dense_model("adam"))
        train_all(learner, x, y, 8, most_batches)
        reference = weights_of(learner) if reference is None else reference
        close(weights_of(learner), reference, 1e-6)


def test_number_of_compilations():
    model, traces = dense_model("adam"), []
    plain_step = model.train_step

    def counted_step(*args):
        traces.append(1)
        return plain_step(*args)

    model.train_step = counted_step
    learner = make_learner(model)
    x, y = classes(46)  # stacks of 2, 2, 1 full batches and a tail of 6 rows
    train_all(learner, x, y, 8, 2)
    counts = [len(traces)]
    for _ in range(2):
        train_all(learner, x, y, 8, 2)
        counts.append(len(traces))
    if BACKEND == "torch":
        assert counts == [6, 12, 18]
    else:
        assert counts[2] == counts[1] == counts[0] <= 3
    if BACKEND == "jax":
        steps = learner._train_steps
        assert steps._loop._cache_size() + steps._single._cache_size() == 2


def test_gradient_of_a_linear_model_by_hand():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    learner = make_learner(model)
    x = np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32)
    y = np.array([[[0.0], [1.0]]], np.float32)
    out = np.empty(3, np.float32)
    learner.gradients(BatchStack({"features": x}, {"label": y}, None, 1, 2), out)
    error = x[0].sum(1, keepdims=True) - y[0]  # kernel ones, bias zero
    expected = np.concatenate([(2 * error * x[0]).mean(0), (2 * error).mean(0)])
    close(out, expected)
    close(weights_of(learner), [1, 1, 0])  # no step was taken
    assert learner.optimizer.step == 0
    learner.apply_gradients(out)
    close(weights_of(learner), np.array([1, 1, 0]) - 0.01 * expected)
    assert learner.optimizer.step == 1


def test_a_step_takes_the_gradients_that_the_workers_of_its_run_know():
    """A kept learner takes other steps in a later run, with what it compiled before, too."""
    learner = make_learner(dense_model())
    slot = learner.layout.slots[0]
    first = slice(slot.offset, slot.offset + slot.size)
    out = np.empty(learner.layout.size, np.float32)
    learner.gradients(next(stacks(*classes(8), 8, 1)), out)
    for has, moves in (([True] * 4, True), ([False] + [True] * 3, False), ([True] * 4, True)):
        learner.know_gradients(lambda mine, has=has: has)
        before = weights_of(learner)
        learner.apply_gradients(out)
        changed = weights_of(learner) != before
        assert changed[first].any() == moves
        assert changed[first.stop :].any()


def test_gradients_and_apply_equal_train():
    x, y = classes(30)
    one, two = (make_learner(dense_model("adam", norm=True)) for _ in range(2))
    out = np.empty(one.layout.size, np.float32)
    for stack in stacks(x, y, 8, 1):
        one.train(stack)
        two.gradients(stack, out)
        two.apply_gradients(out)
        out[:] = np.nan  # the buffer is the caller's again
    close(weights_of(one), weights_of(two), 1e-6)
    close(one.metrics.state(), two.metrics.state(), 1e-6)
    assert one.optimizer.step == two.optimizer.step == 4


class Exchange:
    """A reducer and exchanger that nobody else uses; its buffer lies where TensorFlow can read it
    without a copy."""

    in_graph, skips, refused = None, False, False
    takes_slices, slices = False, ()

    def __init__(self, layout, change=0.0):
        room = np.zeros(layout.size + 16, np.float32)
        self.buffer = room[-room.ctypes.data % 64 // 4 :][: layout.size]
        self.parts, self.rows = [slice(0, layout.size)], 0
        self.change, self.seen = np.float32(change), []

    def begin(self, part):
        assert self.rows

    def finish(self):
        return True

    def exchange(self):
        self.seen.append(self.buffer.copy())
        self.buffer += self.change

    def agree_on_stop(self, value):
        pass

    def agree_on_gradients(self, mine):
        return mine

    num_workers = 1

    def agree_on_terms(self, mine):
        return 0

    def add_up(self, numbers):
        return numbers

    def is_sound(self):
        return bool(np.isfinite(self.buffer).all())


class LooksAmid(Exchange):
    """Reads the state amid each exchange, as for a worker that is lost and asks for it."""

    def __init__(self, learner):
        super().__init__(learner.layout)
        self.learner, self.states = learner, []

    def finish(self):
        time.sleep(0.02)  # what does not wait for this is done then
        self.states.append(state_of(self.learner))
        return True


def state_of(learner):
    trained = learner.layout.trained_size
    return weights_of(learner)[:trained].tobytes(), learner.optimizer.state()


STATEFUL = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.9), weight_decay=0.1
    ),
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=4.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_the_state_amid_an_exchange_is_that_of_before_the_step(name):
    x, y = classes(40)
    learner, alone = (make_learner(dense_model(STATEFUL[name](), norm=True)) for _ in range(2))
    amid, between = LooksAmid(learner), Exchange(alone.layout)
    for stack in stacks(x, y, 8, 5):
        learner.train_reducing(stack, amid)
    expected = []
    for stack in stacks(x, y, 8, 1):
        expected.append(state_of(alone))
        alone.train_reducing(stack, between)
    assert len(amid.states) == 5
    assert [a == b for a, b in zip(amid.states, expected, strict=True)] == [True] * 5


class SkippingExchange(Exchange):
    """Leaves out what is not finite, as all workers together would: a step without a gradient."""

    skips = True

    def __init__(self, learner, parts):
        super().__init__(learner.layout)
        trained = self.layout_trained = learner.layout.trained_size
        self.parts = (
            [slice(trained, learner.layout.size), slice(0, trained)]
            if parts == 2
            else [slice(0, learner.layout.size)]
        )
        self.statistics = weights_of(learner)[trained:]
        self.begun = []

    def begin(self, part):
        self.begun.append(part)
        if part == 0:  # all of the gradient is there
            self.refused = not np.isfinite(self.buffer).all()

    def finish(self):
        if self.refused:
            self.buffer[: self.layout_trained] = 0
            self.buffer[self.layout_trained :] = self.statistics
        self.statistics = self.buffer[self.layout_trained :].copy()
        return not self.refused


class LastGradient(keras.optimizers.Optimizer):
    """Steps along the gradient of the step before, which a variable keeps."""

    def build(self, variables):
        super().build(variables)
        self.last = [self.add_variable_from_reference(v, name="last") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        last = self.last[self._get_variable_index(variable)]
        self.assign_sub(variable, last * keras.ops.cast(learning_rate, variable.dtype))
        self.assign(last, gradient)


def sixteen(optimizer):
    """A model whose variables all begin at multiples of 64 bytes."""
    keras.utils.set_random_seed(1)
    norm = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16, "tanh"), norm, layers.Dense(16)])
    model.compile(optimizer, "mse", jit_compile=JIT)
    x = RNG.normal(size=(40, 16)).astype(np.float32)
    return model, x, np.tanh(x[:, ::-1])


@pytest.mark.parametrize("optimizer", ["adam", "own"])
@pytest.mark.parametrize("inside", ["gradients", "weights"])
def test_no_variable_keeps_the_memory_of_an_exchange(inside, optimizer):
    model, x, y = sixteen(LastGradient(0.1) if optimizer == "own" else optimizer)
    custom = {"LastGradient": LastGradient}
    with keras.saving.custom_object_scope(custom):
        alone, learner = make_learner(model), make_learner(copy_of(model))
    for stack in stacks(x, y, 8, 2):
        alone.train(stack)
        exchange = Exchange(learner.layout)
        if inside == "gradients":
            learner.train_reducing(stack, exchange)
        else:
            learner.train_exchanging(stack, 1, exchange)
        exchange.buffer[...] = np.nan  # what comes next there is none of the learner's
    close(weights_of(learner), weights_of(alone), 1e-5)
    predicted, expected = (predict(which, {"features": x[:16]}) for which in (learner, alone))
    close(list(predicted.values()), list(expected.values()), 1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_that_is_left_out_leaves_no_trace(parts):
    x, y = classes(38)
    broken = x.copy()
    broken[11] = np.nan  # in the second of four batches of a stack
    clean = np.r_[0:8, 16:38]
    alone, learner = (make_learner(dense_model("adam", norm=True)) for _ in range(2))
    exchange = SkippingExchange(learner, parts)
    for stack in stacks(broken, y, 8, 4):
        learner.train_reducing(stack, exchange)
    train_all(alone, x[clean], y[clean], 8, 4)
    assert exchange.begun == list(range(parts)) * 5
    close(weights_of(learner), weights_of(alone), 1e-5)
    close(learner.metrics.state(), alone.metrics.state(), 1e-4)
    assert learner.optimizer.step == alone.optimizer.step == 4


def test_metrics_kept_and_restored():
    x, y = classes(24)
    learner = make_learner(dense_model("adam"))
    learner.metrics.keep()  # before there are any
    learner.metrics.restore()
    first, second, third = stacks(x, y, 8, 1)
    learner.train(first)
    learner.metrics.keep()
    kept = learner.metrics.state()
    learner.evaluate([third])
    for _ in range(2):
        learner.train(second)
        learner.metrics.restore()
        close(learner.metrics.state(), kept)
    learner.metrics.reset()
    learner.train(second)
    learner.metrics.restore()  # of the epoch before is nothing left
    assert not learner.metrics.state().any()


def test_weights_of_all_workers_hold_the_constraints():
    keras.utils.set_random_seed(1)
    first = layers.Dense(5, kernel_constraint="non_neg", name="first")
    last = layers.Dense(2, kernel_constraint=keras.constraints.UnitNorm(), name="last")
    model = keras.Sequential([keras.Input((4,)), first, last])
    model.compile("sgd", "mse", jit_compile=JIT)
    learner = make_learner(model)
    flat = RNG.normal(size=learner.layout.size).astype(np.float32)
    held = learner.constrained(flat)
    assert held is not flat
    a, b, c, d = learner.layout.views(held)
    before = learner.layout.views(flat)
    close(a, np.maximum(before[0], 0))
    close(np.linalg.norm(c, axis=0), 1)
    close(b, before[1])
    close(d, before[3])
    non_negative = np.abs(flat)
    close(learner.layout.views(learner.constrained(non_negative))[0], np.abs(before[0]), 0)
    free = make_learner(dense_model())
    plain = weights_of(free)
    assert free.constrained(plain) is plain


@pytest.mark.parametrize("window", [1, 2, 4])
def test_an_exchange_within_a_stack_equals_one_after_it(window):
    x, y = classes(46)
    one, two = (make_learner(dense_model("adam", norm=True)) for _ in range(2))
    mine, other = (Exchange(one.layout, 0.01) for _ in range(2))
    for stack in stacks(x, y, 8, 4):  # 4 batches, 1, and one of 6 rows
        one.train_exchanging(stack, window, mine)
        for first in range(0, stack.num_batches, window):
            two.train(stack.part(first, min(window, stack.num_batches - first)))
            two.read_weights(other.buffer)
            other.exchange()
            two.write_weights(other.buffer)
    assert len(mine.seen) == len(other.seen) == 4 // window + 2
    close(mine.seen, other.seen, 1e-5)
    close(weights_of(one), weights_of(two), 1e-5)
    close(weights_of(one), mine.seen[-1] + 0.01, 1e-5)
    close(one.metrics.state(), two.metrics.state(), 1e-4)
    assert one.optimizer.step == two.optimizer.step == 6


def test_what_an_exchange_raises_ends_the_call():
    class Broken(Exchange):
        def exchange(self):
            raise RuntimeError("the server is gone")

    x, y = classes(16)
    learner = make_learner(dense_model())
    with pytest.raises(Exception, match="the server is gone"):
        learner.train_exchanging(next(stacks(x, y, 8, 2)), 1, Broken(learner.layout))
    train_all(learner, x, y, 8, 2)  # it can be used again
    assert np.isfinite(weights_of(learner)).all()


def test_gradients_refuse_a_stack_of_several_batches():
    x, y = classes(16)
    learner = make_learner(dense_model())
    with pytest.raises(ModelError, match="1 batch"):
        learner.gradients(next(stacks(x, y, 8, 2)), np.empty(learner.layout.size, np.float32))


def test_sample_weights():
    x, y = classes(30)
    model = dense_model(keras.optimizers.SGD(0.1), weighted_metrics=["accuracy"])
    compare_with_fit(model, x, y, sample_weight=RNG.uniform(0, 2, 30).astype(np.float32))


def test_several_inputs_and_outputs_by_name():
    keras.utils.set_random_seed(3)
    left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
    hidden = layers.Dense(4, "relu")(layers.Concatenate()([left, right]))
    outputs = {
        "kind": layers.Dense(3, "softmax", name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
    }
    x = {n: RNG.normal(size=(16, k)).astype(np.float32) for n, k in (("left", 3), ("right", 2))}
    y = {"kind": RNG.integers(0, 3, 16), "size": RNG.normal(size=(16, 1)).astype(np.float32)}
    weight = {n: RNG.uniform(0.5, 1.5, 16).astype(np.float32) for n in y}
    expected = None
    for inputs in ({"left": left, "right": right}, [left, right]):
        model = keras.Model(inputs, outputs)
        model.compile(
            "adam",
            loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.5},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
            jit_compile=JIT,
        )
        other = copy_of(model)
        learner = make_learner(other)
        start = weights_of(learner)
        train_all(learner, x, y, 8, 2, weight)
        if expected is None:
            history = model.fit(
                x, y, batch_size=8, shuffle=False, verbose=0, sample_weight=weight
            ).history
            expected = read_model(model, learner.layout)
            write_model(model, learner.layout, start)
            close(metric_results(other, learner.metrics.state())["loss"], history["loss"][0], 1e-4)
        close(weights_of(learner), expected)
        predicted = predict(learner, x)
        assert {k: v.shape for k, v in predicted.items()} == {"kind": (16, 3), "size": (16, 1)}


@pytest.mark.parametrize(
    ("loss", "kind", "bounds"),
    [
        ("binary_crossentropy", "binary", (0, 1)),
        (keras.losses.BinaryCrossentropy(from_logits=True), "binary", (0, 1)),
        (keras.losses.BinaryFocalCrossentropy(), "binary", (0, 1)),
        (keras.losses.binary_crossentropy, "binary", (0, 1)),
        ("categorical_crossentropy", "dense", (0, np.inf)),
        (keras.losses.CategoricalFocalCrossentropy(), "dense", (0, np.inf)),
        ("sparse_categorical_crossentropy", "sparse", None),
        ("poisson", "dense", (0, np.inf)),
        (keras.losses.MeanSquaredLogarithmicError(), "dense", (0, np.inf)),
        ("msle", "dense", (0, np.inf)),
        ("kl_divergence", "dense", (0, 1)),
        (keras.losses.Dice(), "dense", (0, 1)),
        (keras.losses.Tversky(), "dense", (0, 1)),
        ("hinge", "dense", (-1, 1)),
        (keras.losses.SquaredHinge(), "dense", (-1, 1)),
        ("categorical_hinge", "dense", (0, 1)),
        ("mse", "dense", None),
        ("mape", "dense", None),
        ("log_cosh", "dense", None),
        (keras.losses.CosineSimilarity(), "dense", None),
        (lambda y, p: keras.ops.mean(p - y, -1), "own", None),
    ],
)
def test_what_labels_a_loss_takes(loss, kind, bounds):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, "sigmoid", name="out")])
    model.compile("sgd", loss)
    signature = model_signature(model)
    assert set(signature.label_kinds.values()) == {kind}
    (name,) = signature.outputs
    assert signature.label_bounds(name) == bounds


def test_outputs_in_a_list():
    keras.utils.set_random_seed(3)
    entry = keras.Input((3,))
    model = keras.Model(entry, [layers.Dense(1, name="a")(entry), layers.Dense(2, name="b")(entry)])
    model.compile("sgd", ["mse", "mse"], jit_compile=JIT)
    learner = make_learner(copy_of(model))
    x = RNG.normal(size=(8, 3)).astype(np.float32)
    a, b = (RNG.normal(size=(8, k)).astype(np.float32) for k in (1, 2))
    train_all(learner, x, {"b": b, "a": a}, 4, 2)
    model.fit(x, [a, b], batch_size=4, shuffle=False, verbose=0)
    close(weights_of(learner), read_model(model, learner.layout))
    assert list(predict(learner, {"features": x})) == ["a", "b"]


@pytest.mark.parametrize("kind", ["embedding", "lstm", "conv"])
def test_other_layers_equal_keras_fit(kind):
    keras.utils.set_random_seed(2)
    if kind == "conv":
        x = RNG.normal(size=(16, 6, 6, 1)).astype(np.float32)
        body = [keras.Input((6, 6, 1)), layers.Conv2D(3, 3, activation="relu")]
        body += [layers.BatchNormalization(), layers.Flatten()]
    else:
        x = RNG.integers(0, 11, (16, 4)).astype(np.int32)
        body = [keras.Input((4,), dtype="int32"), layers.Embedding(11, 4)]
        body += [layers.LSTM(3)] if kind == "lstm" else [layers.GlobalAveragePooling1D()]
    model = keras.Sequential([*body, layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", jit_compile=JIT)
    y = RNG.integers(0, 2, (16, 1)).astype(np.float32)
    learner = compare_with_fit(model, x, y, tolerance=2e-5)
    out = np.empty(learner.layout.size, np.float32)
    learner.gradients(next(stacks(x, y, 8, 1)), out)
    learner.apply_gradients(out)
    assert np.isfinite(weights_of(learner)).all()


# -- custom code -------------------------------------------------------------------------------


class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


def half_squared(y, predicted):
    return keras.ops.mean(keras.ops.square(predicted - y), -1) / 2


class MaxError(keras.metrics.Metric):
    def __init__(self, name="max_error", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y, predicted, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y - predicted)))

    def result(self):
        return keras.ops.convert_to_tensor(self.total)


class Bare(keras.Model):
    """A constructor without arguments, and a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, "tanh")
        self.out = layers.Dense(1)

    def build(self, shape):
        self.hidden.build(shape)
        self.out.build((shape[0], 4))
        self.built = True

    def call(self, x):
        return self.out(self.hidden(x))

    if BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = 3.0 * self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    elif BACKEND == "torch":

        def train_step(self, data):
            import torch

            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.zero_grad()
            loss = 3.0 * self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply(
                    [v.value.grad for v in self.trainable_weights], self.trainable_weights
                )
            return {"loss": loss}

    else:

        def train_step(self, state, data):
            import jax

            trainable, non_trainable, optimizer, metrics = state
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

            def loss_of(trainable):
                predicted, after = self.stateless_call(trainable, non_trainable, x)
                return 3.0 * self.compute_loss(x, y, predicted), after

            (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {"loss": loss}, (trainable, after, optimizer, metrics)


def test_bare_subclass_with_its_own_train_step():
    keras.utils.set_random_seed(5)
    model = Bare()
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=JIT)
    other = copy_of(model)
    close(read_model(other, model_layout(other)), read_model(model, model_layout(model)))
    learner = make_learner(other)
    x = RNG.normal(size=(12, 3)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    before = weights_of(learner)
    out = np.empty_like(before)
    learner.gradients(next(stacks(x[:4], y[:4], 4, 1)), out)
    train_all(learner, x[:4], y[:4], 4, 1)
    close(weights_of(learner), before - 0.01 * out)  # the factor 3 is in both
    model.fit(x[:4], y[:4], batch_size=4, shuffle=False, verbose=0)
    close(weights_of(learner), read_model(model, learner.layout))


def test_custom_layer_loss_and_metric_travel():
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((3,)), Scale(), layers.Dense(1)])
    model.compile("adam", half_squared, metrics=[MaxError(), "mae"], jit_compile=JIT)
    x = RNG.normal(size=(20, 3)).astype(np.float32)
    compare_with_fit(model, x, x.sum(1, keepdims=True))


def local_tanh(factor):
    def tanh(x):
        return factor * keras.ops.tanh(x)

    return tanh


def test_lambdas_and_local_functions_travel_with_what_they_use():
    """Keras saves their code without globals, and functions of equal names as one."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Lambda(lambda x: keras.ops.tanh(x) + SHIFT),
        layers.Lambda(local_tanh(2.0)),
        layers.Lambda(local_tanh(3.0)),
        layers.Dense(4, activation=lambda x: keras.ops.relu(x) - SHIFT),
        layers.Dense(1, kernel_initializer=lambda s, dtype=None: keras.ops.ones(s, dtype)),
    ])  # fmt: skip
    model.compile(
        keras.optimizers.SGD(0.01),
        loss=lambda y, p: keras.ops.mean(keras.ops.square(y - p), -1),
        metrics=[
            lambda y, p: keras.ops.mean(keras.ops.abs(y - p) + SHIFT, -1),
            keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.abs(y - p), name="wrapped"),
        ],
        jit_compile=JIT,
    )
    x = RNG.normal(size=(20, 3)).astype(np.float32)
    names = [layer.function.__name__ for layer in model.layers[:3]]
    compare_with_fit(model, x, x.sum(1, keepdims=True))
    assert names == [layer.function.__name__ for layer in model.layers[:3]] == [
        "<lambda>", "tanh", "tanh"]  # fmt: skip
    assert encode_model(model).key == encode_model(model).key


def test_a_lambda_that_cannot_be_pickled_is_refused_on_the_driver():
    lock = threading.Lock()
    model = keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: x if lock else -x)])
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match="cannot be sent to the workers") as caught:
        encode_model(model)
    assert "lock" in caught.value.received


def test_functions_that_keras_does_not_save_need_not_travel():
    lock = threading.Lock()
    model = dense_model()
    model.layers[0].on_change = lambda: lock.acquire()
    encode_model(model)


class NoStep(keras.Model):
    """A train_step that steps no optimizer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = layers.Dense(1)

    def build(self, shape):
        self.out.build(shape)
        self.built = True

    def call(self, x):
        return self.out(x)

    def train_step(self, *args):
        return ({}, args[0]) if BACKEND == "jax" else {}


def test_a_train_step_without_a_gradient_is_refused():
    model = NoStep()
    model.build((None, 3))
    model.compile("sgd", "mse")
    learner = make_learner(model)
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    with pytest.raises(ModelError, match="no gradient"):
        learner.gradients(next(stacks(x, x[:, :1], 4, 1)), np.empty(4, np.float32))


# -- metrics -----------------------------------------------------------------------------------


def binary_model():
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    model.compile("sgd", "binary_crossentropy", metrics=metrics, jit_compile=JIT)
    return model


def test_metric_states_of_workers_add_up():
    x = RNG.normal(size=(40, 4)).astype(np.float32)
    y = (x[:, :1] + 0.3 * RNG.normal(size=(40, 1)) > 0).astype(np.float32)
    model = binary_model()
    learner = make_learner(model)
    whole = learner.evaluate(stacks(x, y, 8, 2))
    # Uneven parts, as of two workers.
    parts = learner.evaluate(stacks(x[:24], y[:24], 8, 2))
    parts = parts + learner.evaluate(stacks(x[24:], y[24:], 6, 2))
    close(parts, whole)
    results = metric_results(model, parts)
    expected = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert set(results) == set(expected) == {"loss", "accuracy", "auc", "precision"}
    for name, value in expected.items():
        close(results[name], value, 1e-4)


def test_evaluate_leaves_training_metrics_alone():
    x = RNG.normal(size=(24, 4)).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    learner = make_learner(binary_model())
    train_all(learner, x, y, 8, 2)
    before, weights = learner.metrics.state(), weights_of(learner)
    held_out = learner.evaluate(stacks(x[:10], y[:10], 8, 2))
    close(learner.metrics.state(), before, 0)
    close(weights_of(learner), weights, 0)
    assert held_out.shape == before.shape
    assert held_out[1] == 10  # rows in the loss tracker
    assert learner.evaluate([]).size == 0
    learner.metrics.reset()
    assert not learner.metrics.state().any()


# -- weights and optimizer ---------------------------------------------------------------------


def test_weights_round_trip_and_do_not_share_memory():
    learner = make_learner(dense_model(norm=True))
    flat = np.arange(learner.layout.size, dtype=np.float32) / 100
    learner.write_weights(flat)
    close(weights_of(learner), flat, 0)
    expected = flat.copy()
    flat[:] = np.nan
    close(weights_of(learner), expected, 0)
    out = weights_of(learner)
    x, y = classes(16)
    kept = out.copy()
    train_all(learner, x, y, 8, 2)
    close(out, kept, 0)
    with pytest.raises(ConfigError, match="does not fit the layout"):
        learner.write_weights(expected[1:])
    with pytest.raises(ConfigError, match="does not fit the layout"):
        learner.write_weights(expected.astype(np.float64))


def test_a_model_of_one_vector_does_not_share_the_buffer():
    model = keras.Sequential([keras.Input((64,)), Scale()])
    model.compile("sgd", "mse")
    learner = make_learner(model)
    flat = np.ones(64, np.float32)
    learner.write_weights(flat)
    flat[:] = 7
    close(weights_of(learner), np.ones(64), 0)
    x = np.zeros((2, 64), np.float32)
    train_all(learner, x, x, 2, 1)
    close(weights_of(learner), np.ones(64), 0)
    close(flat, np.full(64, 7), 0)
    out = np.full(64, 0.5, np.float32)
    learner.apply_gradients(out)
    out[:] = 9
    close(weights_of(learner), np.ones(64) - 0.005)


def test_averaged_segment_is_batch_statistics_only():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="frozen"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, seed=1),
            layers.Dense(2),
        ]
    )
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    learner = make_learner(model)
    slots = learner.layout.slots
    averaged = [s.name for s in slots if s.offset >= learner.layout.trained_size]
    assert ["/".join(name.split("/")[-2:]) for name in averaged] == [
        "norm/moving_mean",
        "norm/moving_variance",
    ]
    assert not any("frozen" in s.name or "seed" in s.name for s in slots)
    assert learner.layout == model_layout(model)


def test_write_model_and_read_model():
    model = dense_model(norm=True)
    layout = model_layout(model)
    flat = np.linspace(0, 1, layout.size, dtype=np.float32)
    write_model(model, layout, flat)
    close(read_model(model, layout), flat, 0)
    learner = make_learner(model)
    close(weights_of(learner), flat, 0)


def test_sync_model_and_reload():
    x, y = classes(24)
    model = dense_model("adam", norm=True)
    learner = make_learner(model)
    train_all(learner, x, y, 8, 2)
    learner.sync_model()
    close(read_model(model, learner.layout), weights_of(learner), 0)
    assert int(model.optimizer.iterations.numpy()) == 3
    train_all(learner, x, y, 8, 2)  # the model's copy stays readable
    assert np.isfinite(model.get_weights()[0]).all()
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    learner.reload()
    assert not weights_of(learner).any()


def test_optimizer_state_continues_identically():
    x, y = classes(24)
    one, two = (make_learner(dense_model("adam")) for _ in range(2))
    train_all(one, x, y, 8, 2)
    two.write_weights(weights_of(one))
    state = one.optimizer.state()
    with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
        assert len(arrays.files) == len(one.model.optimizer.variables)
    two.optimizer.load_state(state)
    assert two.optimizer.step == one.optimizer.step == 3
    train_all(one, x, y, 8, 2)
    train_all(two, x, y, 8, 2)
    close(weights_of(one), weights_of(two), 1e-7)
    wrong = make_learner(dense_model("sgd"))
    with pytest.raises(ModelError, match="optimizer state"):
        wrong.optimizer.load_state(state)


def test_learning_rate():
    x, y = classes(8)
    learner = make_learner(dense_model(keras.optimizers.SGD(0.5)))
    assert learner.optimizer.learning_rate == 0.5
    assert not learner.optimizer.has_schedule
    before = weights_of(learner)
    learner.optimizer.set_learning_rate(0.0)
    assert learner.optimizer.learning_rate == 0.0
    train_all(learner, x, y, 8, 1)
    close(weights_of(learner), before, 0)


def test_learning_rate_schedule():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.5, 0.0])
    learner = make_learner(copy_of(dense_model(keras.optimizers.SGD(schedule))))
    x, y = classes(8)
    assert learner.optimizer.has_schedule
    assert learner.optimizer.learning_rate == 0.5
    with pytest.raises(ConfigError, match="schedule"):
        learner.optimizer.set_learning_rate(0.1)
    before = weights_of(learner)
    train_all(learner, x, y, 8, 1)
    assert np.abs(weights_of(learner) - before).max() > 0
    learner.optimizer.set_step(20)
    assert learner.optimizer.step == 20
    assert learner.optimizer.learning_rate == 0.0
    before = weights_of(learner)
    train_all(learner, x, y, 8, 1)
    close(weights_of(learner), before, 0)
    assert learner.optimizer.step == 21


def test_set_step_leaves_a_plain_optimizer_alone():
    learner = make_learner(dense_model("adam"))
    learner.optimizer.set_step(20)
    assert learner.optimizer.step == 0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
def test_reduced_precision(policy):
    x, y = classes(16)
    keras.config.set_dtype_policy(policy)
    try:
        # Adam's beta_2 is 1 in bfloat16, so that it does not learn; that is Keras' own.
        adam = policy.startswith("mixed")
        optimizer = keras.optimizers.Adam(0.01) if adam else keras.optimizers.SGD(0.01)
        learner = make_learner(copy_of(dense_model(optimizer)))
    finally:
        keras.config.set_dtype_policy("float32")
    assert learner.optimizer.learning_rate == pytest.approx(0.01)
    for _ in range(3):
        train_all(learner, x, y, 8, 2)
    # In float16, steps whose scaled gradients overflow are left out.
    steps = learner.optimizer.step
    assert 3 <= steps <= 6 if policy == "mixed_float16" else steps == 6
    out = np.empty(learner.layout.size, np.float32)
    learner.gradients(next(stacks(x, y, 8, 1)), out)
    before = weights_of(learner)
    learner.apply_gradients(out)
    after = weights_of(learner)
    assert np.isfinite(after).all()
    assert 0 < np.abs(after - before).max() < 0.1  # the loss scale has gone again
    assert learner.optimizer.step == steps + 1
    learner.optimizer.set_learning_rate(0.25)
    assert learner.optimizer.learning_rate == 0.25
    learner.optimizer.load_state(learner.optimizer.state())
    assert learner.optimizer.step == steps + 1


# -- prediction --------------------------------------------------------------------------------


def test_predict_equals_keras():
    x, _ = classes(20)
    model = dense_model(norm=True)
    learner = make_learner(model)
    expected = model.predict(x, verbose=0)
    for rows in (20, 7, 1):
        outputs = predict(learner, {"features": x[:rows]}, 20)
        (value,) = outputs.values()
        assert isinstance(value, np.ndarray)
        close(value, expected[:rows])


def fails_in_a_loss(y, p):
    return p.missing


@pytest.mark.parametrize(
    ("loss", "metric", "match"),
    [
        ("sparse_categorical_crossentropy", "auc", "metric 'auc"),
        (fails_in_a_loss, "accuracy", "loss 'fails_in_a_loss'"),
        ("sparse_categorical_crossentropy", "accurac", "a metric that Keras does not know"),
    ],
)
def test_a_mistake_in_compile_is_told_by_its_name(loss, metric, match):
    model = dense_model()
    model.compile("sgd", loss, metrics=[metric])
    with pytest.raises(ModelError, match=match):
        make_learner(model).metrics.build(next(stacks(*classes(), 8, 2)))


def test_labels_with_and_without_a_last_dimension_of_one():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=JIT)
    traces, step = [], model.train_step
    model.train_step = lambda *data: (traces.append(1), step(*data))[1]
    learner = make_learner(model)
    x = RNG.normal(size=(30, 4)).astype(np.float32)
    start, out, counts, results = weights_of(learner), weights_of(learner), [], []
    for y in (x.sum(1), x.sum(1, keepdims=True)) * 2:
        learner.write_weights(start)
        train_all(learner, x, y, 8, 2)
        state = learner.evaluate(stacks(x, y, 8, 2))
        learner.gradients(next(stacks(x, y, 8, 1)), out)
        results.append(np.concatenate([weights_of(learner), state, out]))
        counts.append(len(traces))
    for result in results[1:]:
        close(result, results[0])
    if BACKEND != "torch":  # which runs Python in each step
        assert counts[3] == counts[1]


def test_read_only_and_strided_rows():
    x, y = classes(16)
    x.flags.writeable = False
    learner = make_learner(dense_model())
    train_all(learner, x[:, ::-1], y, 8, 2)
    assert np.isfinite(weights_of(learner)).all()


def test_uint8_and_float64_rows():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,), dtype="uint8"), layers.Rescaling(1 / 255),
                              layers.Dense(1)])  # fmt: skip
    model.compile("sgd", "mse", jit_compile=JIT)
    x = RNG.integers(0, 255, (16, 4)).astype(np.uint8)
    compare_with_fit(model, x, RNG.normal(size=(16, 1)))


# -- the worker's cache ------------------------------------------------------------------------


def test_cached_learner_is_as_new():
    x, y = classes(24)
    archive = encode_model(dense_model(keras.optimizers.Adam(0.05), norm=True))
    first = cached_learner(archive)
    start = weights_of(first)
    train_all(first, x, y, 8, 2)
    trained, metrics = weights_of(first), first.metrics.state()
    first.optimizer.set_learning_rate(0.7)
    again = cached_learner(archive)
    assert again is first
    close(weights_of(again), start, 0)
    assert again.optimizer.step == 0
    assert again.optimizer.learning_rate == pytest.approx(0.05)
    assert not again.metrics.state().any()
    train_all(again, x, y, 8, 2)
    close(weights_of(again), trained, 1e-7)
    close(again.metrics.state(), metrics, 1e-7)
    forget_learner(archive)
    assert cached_learner(archive) is not first
    forget_learner(archive)


def test_cached_learner_takes_the_optimizer_of_a_trained_model():
    x, y = classes(24)
    model = dense_model("adam", name="same")
    model.fit(x, y, epochs=2, batch_size=8, verbose=0)
    fresh = encode_model(dense_model("adam", name="same"))
    used = cached_learner(fresh)
    train_all(used, x, y, 8, 2)
    archive = encode_model(model)
    assert archive.key == fresh.key
    again = cached_learner(archive)
    assert again is used
    assert again.optimizer.step == 6
    other = make_learner(decode_model(archive))
    for learner in (again, other):
        train_all(learner, x, y, 8, 2)
    close(weights_of(again), weights_of(other), 1e-7)
    forget_learner(archive)


def test_dropout_differs_from_step_to_step():
    model = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5, seed=3), Scale()])
    model.compile(keras.optimizers.SGD(1.0), "mae")
    learner = make_learner(model)
    x = np.ones((2, 50), np.float32)
    changed = []
    for _ in range(2):
        learner.write_weights(np.ones(50, np.float32))
        train_all(learner, x, np.zeros((2, 50), np.float32), 2, 1)
        changed.append(weights_of(learner) != 1)
    assert changed[0].any()
    assert (changed[0] != changed[1]).any()


@pytest.mark.parametrize("way", ["joined", "gradients", "train"])
def test_a_rank_that_enters_amid_an_epoch_draws_what_the_lost_one_would_have(way):
    """Before, on PyTorch: a Dropout without a seed began again with the first step's numbers."""
    x, y = classes(32)
    model = dense_model("adam")
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), *model.layers])
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=JIT)
    archive = encode_model(model)

    def trained(rank, first=0, last=4, state=None):
        learner = make_learner(decode_model(archive))
        learner.take_stream(rank, 2)
        if state is not None:
            state.load_into(learner)
        learner.draws.mark(7, 2, first)
        exchange, flat = Exchange(learner.layout), np.empty(learner.layout.size, np.float32)
        for stack in list(stacks(x, y, 8, 1))[first:last]:
            if way == "joined":
                learner.train_reducing(stack, exchange)
            elif way == "gradients":  # as rules that take the step themselves
                learner.gradients(stack, flat)
                learner.apply_gradients(flat)
            else:
                learner.train(stack)
        return learner

    undisturbed = state_of(trained(1))
    assert state_of(trained(0)) != undisturbed
    lost = RunState.of(trained(1, last=2), 2)
    assert state_of(trained(1, first=2, state=lost)) == undisturbed


def test_uncompiled_models_are_refused():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with pytest.raises(ModelError, match="not compiled"):
        make_learner(model)
    with pytest.raises(ModelError, match="cannot train"):
        make_learner(object())


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch always runs eagerly here")
def test_run_eagerly():
    x, y = classes(16)
    eager = make_learner(dense_model("adam", run_eagerly=True))
    compiled = make_learner(dense_model("adam"))
    for learner in (eager, compiled):
        train_all(learner, x, y, 8, 2)
    close(weights_of(eager), weights_of(compiled))
