"""Callbacks that write to the model on the driver: trained on by workers in threads as by Keras."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from harness import global_batches, split

from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.files.run_state import RunState
from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.callback_sink import CallbackSink
from sparkdl.learner.state.metric_state import metric_results
from sparkdl.learner.state.model_weights import model_layout, read_model, write_model
from sparkdl.learner.state.optimizer_state import load_optimizer_state
from sparkdl.progress.events import progress_of
from sparkdl.progress.monitor import FitMonitor
from sparkdl.ps.client import pull_center
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP, Downpour
from sparkdl.testing.inproc import InprocParameterServer
from sparkdl.worker import train

Part = tuple[np.ndarray, np.ndarray]


@keras.saving.register_keras_serializable("test_callbacks_exact")
class Scaled(keras.layers.Layer):
    """Its scale and its whole number are set by callbacks."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.level = self.add_weight(shape=(), initializer="ones", dtype="int32", trainable=False)

    def call(self, x: Any) -> Any:
        return x * self.scale * keras.ops.cast(self.level, x.dtype)


def make_model(rate: float = 0.05) -> Any:
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), Scaled(), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def regression(rows: int) -> Part:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) * 0.5).astype("float32")


class Writes(keras.callbacks.Callback):
    """Writes weights, other variables and the optimizer's; keeps what it reads and is told."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[np.ndarray]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[1].scale.assign(1 + 0.1 * epoch)
        self.model.optimizer.learning_rate = 0.05 / (1 + epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.read.append(self.model.get_weights())
        first = self.model.layers[0]
        first.set_weights([np.clip(w, -0.3, 0.3) for w in first.get_weights()])
        self.model.layers[1].level.assign(1 + epoch % 2)
        if epoch == 1:
            momentum = next(v for v in self.model.optimizer.variables if "momentum" in v.path)
            momentum.assign(np.zeros(momentum.shape))


def fit(
    model: Any, parts: list[Part], rule: Any, callbacks: list[Any], *, epochs: int,
    validation: Part | None = None,
) -> dict[str, list[float]]:  # fmt: skip
    """What the driver does in a fit, with workers as threads that wait for its callbacks."""
    count, size = len(parts), 8
    sink = CallbackSink(model, callbacks, epochs=epochs, verbose=0)
    monitor = FitMonitor(sink, [], partial(metric_results, model), epochs=epochs, first_epoch=0)
    monitor.begin()
    learners = [make_learner(decode_model(encode_model(model))) for _ in parts]
    layout = model_layout(model)
    config = ServerConfig(layout, rule, count, together=True)
    settings = LoopSettings(
        epochs=epochs, batch_size=size, window=1, shuffle=False, wait_for_driver=True,
        keep_state=True,
    )  # fmt: skip
    errors: list[BaseException] = []
    with (
        InprocParameterServer(config, read_model(model, layout)) as server,
        server.driver() as driver,
    ):

        def load() -> None:
            write_model(model, layout, pull_center(driver))
            state = RunState.from_bytes(driver.kept())
            load_optimizer_state(model, state.optimizer, keep_rate=True)

        def work(rank: int) -> None:
            try:
                rows = rows_from_numpy(*parts[rank])
                held_out = None
                if validation is not None:
                    held_out = Batches(rows_from_numpy(*validation), size, shuffle=False)
                with server.client(rank) as client:
                    train(
                        learners[rank], ServerSynchronizer(rule, client, layout, False),
                        Batches(rows, size, shuffle=False, rank=rank), settings,
                        validation=held_out, num_rows=len(rows), num_workers=count,
                    )  # fmt: skip
            except BaseException as error:
                errors.append(error)

        monitor.watch(load)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 200
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(0.01)
            status = driver.status(monitor.epochs_done)
            command = monitor.update(progress_of(status, count, in_step=True))
            if command is not None:
                driver.control(**vars(command))
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"
        if errors:
            raise errors[0]
        if not monitor.stopped:
            write_model(model, layout, server.center)
        monitor.end()
    history: dict[str, list[float]] = sink.history.history
    return history


@pytest.mark.parametrize(("rule", "sizes"), [(BSP(), [48, 48]), (BSP(), [40]), (Downpour(), [40])])
def test_what_callbacks_write_is_trained_as_in_keras(rule: Any, sizes: list[int]) -> None:
    x, y = regression(sum(sizes))
    parts = split(x, y, sizes)
    mine, known = Writes(), Writes()
    model, alone = make_model(), make_model()
    history = fit(model, parts, rule, [mine], epochs=4)
    batches = global_batches(parts, 8)
    expected = alone.fit(
        np.concatenate([b[0] for b in batches]), np.concatenate([b[1] for b in batches]),
        batch_size=8 * len(sizes), epochs=4, shuffle=False, callbacks=[known], verbose=0,
    )  # fmt: skip
    np.testing.assert_allclose(history["loss"], expected.history["loss"], rtol=1e-4)
    for seen, wanted in zip(mine.read, known.read, strict=True):
        for one, other in zip(seen, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_best_weights_are_those_that_workers_who_do_not_wait_have_evaluated() -> None:
    x, y = regression(400)
    best = keras.callbacks.EarlyStopping("val_loss", patience=50, restore_best_weights=True)
    model = make_model(rate=0.3)  # val_loss goes up and down
    held_out = regression(64)
    history = fit(model, split(x, y, [300, 100]), Downpour(), [best], epochs=6, validation=held_out)
    loss = model.evaluate(*held_out, batch_size=64, verbose=0)
    assert loss == pytest.approx(min(history["val_loss"]), rel=1e-4)
