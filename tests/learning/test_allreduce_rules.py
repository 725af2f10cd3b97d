"""Every rule of the all-reduce family with real Keras learners, ranks as threads.

Driven as the docstring of ``sparkdl.collective.rules`` says. Exact rules are one process on the
global batch; the others learn the same task.
"""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
from harness import global_batches, split

from sparkdl.collective.rules import (
    ExchangeRule,
    GradientExchange,
    OneBitAdam,
    OptimizerExchange,
    StragglerDrop,
    WeightsExchange,
    make_rule,
    rule_names,
)
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.learner import make_learner
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.testing.inproc import connect_threads

BATCH = 16
ROWS = [200, 136]


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 12)).astype("float32")
    return x, (x[:, 0] + x[:, 1] > 0).astype("int32") + (x[:, 3] > 1)


def make_model(optimizer: Any, batch_norm: bool = False) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((12,)), keras.layers.Dense(24, activation="relu")]
    if batch_norm:
        layers.append(keras.layers.BatchNormalization())
    layers.append(keras.layers.Dense(3, activation="softmax"))
    model = keras.Sequential(layers)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def run(
    rule: ExchangeRule, optimizer: Any, *, epochs: int, window: int, batch_norm: bool = False
) -> list[tuple[np.ndarray, float]]:
    """The flat weights and the loss on all rows, of each rank."""
    x, y = data(sum(ROWS))
    parts = split(x, y, ROWS)
    models = [make_model(optimizer(), batch_norm) for _ in ROWS]
    learners = [make_learner(model) for model in models]
    rule = rule.bind(len(ROWS), keras.optimizers.serialize(models[0].optimizer))
    layout = model_layout(models[0])
    steps = -(-max(ROWS) // BATCH)
    communicators = connect_threads(len(ROWS))
    results: list[Any] = [None] * len(ROWS)

    def work(rank: int) -> None:
        learner, c = learners[rank], communicators[rank]
        exchange = rule.open(c, layout)
        flat = read_model(models[rank], layout)
        if isinstance(exchange, WeightsExchange):
            exchange.start(flat)
        batches = Batches(rows_from_numpy(*parts[rank]), BATCH, shuffle=False, rank=rank)
        rows_seen = 0
        for epoch in range(epochs):
            windows = iter(batches.stacks(epoch, 1))
            for step in range(steps):
                batch = next(windows, None)
                rows = 0 if batch is None else batch.num_rows

                def compute(out: np.ndarray, batch: Any = batch) -> None:
                    learner.gradients(batch, out)

                given = [] if batch is None else [(compute, rows)]
                if isinstance(exchange, GradientExchange):
                    exchange.take_step(given, learner.apply_gradients)
                elif isinstance(exchange, OptimizerExchange):
                    filled = exchange.fill(given)
                    exchange.step(learner.weights_within, filled, learner.optimizer.learning_rate)
                    learner.write_weights(exchange.buffer)
                else:
                    assert isinstance(exchange, WeightsExchange)
                    if batch is not None:
                        learner.train(batch)
                    rows_seen += rows
                    if (step + 1) % window == 0 or step + 1 == steps:
                        learner.read_weights(flat)
                        exchange.after_window(flat, rows_seen, 1.0, learner.optimizer.learning_rate)
                        learner.write_weights(flat)
                        rows_seen = 0
        if isinstance(exchange, WeightsExchange):
            exchange.finish(flat)
            learner.write_weights(flat)
        c.barrier()
        exchange.close()
        learner.sync_model()
        learner.read_weights(flat)
        results[rank] = flat

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            results[rank] = error
            communicators[rank].close()

    threads = [threading.Thread(target=guarded, args=(r,)) for r in range(len(ROWS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for communicator in communicators:
        communicator.close()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [(f, float(m.evaluate(x, y, verbose=0))) for f, m in zip(results, models, strict=True)]


OPTIMIZERS = {
    "SGD with momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05),
    "clipped AMSGrad": lambda: keras.optimizers.Adam(
        0.01, beta_2=0.7, amsgrad=True, global_clipnorm=0.2
    ),
    "clipped momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.5, clipnorm=0.1),
}


@pytest.mark.parametrize("name", ["mean", "sliced"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_exact_rules_are_one_process_on_the_global_batch(optimizer: Any, name: str) -> None:
    epochs = 4
    results = run(make_rule(name), optimizer, epochs=epochs, window=1)
    x, y = data(sum(ROWS))
    model = make_model(optimizer())
    for _ in range(epochs):
        for bx, by in global_batches(split(x, y, ROWS), BATCH):
            model.train_on_batch(bx, by)
    expected = np.concatenate([np.asarray(v).ravel() for v in model.trainable_variables])
    for flat, _ in results:
        np.testing.assert_allclose(flat, expected, atol=1e-5, rtol=0)
    assert results[0][0].tobytes() == results[1][0].tobytes()


CONFIGURED = {
    "onebit_adam": OneBitAdam(freeze_step=30),
    "straggler_drop": StragglerDrop(patience=5.0, grace_s=1.0),
}


@pytest.mark.parametrize("name", rule_names())
def test_every_rule_learns(name: str) -> None:
    rule = CONFIGURED.get(name, make_rule(name))
    results = run(rule, OPTIMIZERS["Adam"], epochs=8, window=2, batch_norm=True)
    (flat, loss), (other, _) = results
    assert loss < 0.5, loss  # 1.1 at the start
    assert flat.tobytes() == other.tobytes()
    print(f"{name}: loss {loss:.3f}")
