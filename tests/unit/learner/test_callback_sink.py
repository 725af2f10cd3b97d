"""Keras callbacks as a sink: they see a fit's events as those of Keras' own fit."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np

from sparkdl.learner.callback_sink import CallbackSink
from sparkdl.learner.metric_state import metric_results
from sparkdl.progress.commands import Command
from sparkdl.progress.events import EpochBegan, EpochEnded, TrainingBegan
from sparkdl.progress.monitor import FitMonitor
from sparkdl.progress.run_progress import EpochProgress, RunProgress


def make_model(optimizer: Any = None) -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.5), "mse")
    return model


class Calls(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and not name.startswith(("on_test", "on_predict", "on_batch")):
            self.names.append(name)
        return super().__getattribute__(name)


def progress(*epochs: tuple[int, int]) -> RunProgress:
    """Epochs as (missing, batches), of 4 rows a batch, each with a loss of 2."""
    found = {
        i: EpochProgress(m, b, 4 * b, np.array([8.0 * b, 4.0 * b]), np.empty(0))
        for i, (m, b) in enumerate(epochs)
    }
    return RunProgress(found, 10, sum(4 * b for _, b in epochs), 2)


def test_a_fit_s_events_are_those_of_keras() -> None:
    model, calls = make_model(), Calls()
    logs: list[Any] = []
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, told: logs.append((e, told)))
    sink = CallbackSink(model, [calls, log], epochs=2, verbose=0)
    calls.names.clear()
    monitor = FitMonitor(sink, [], partial(metric_results, model), epochs=2, first_epoch=0)
    monitor.begin()
    monitor.update(progress((2, 5)))
    assert monitor.update(progress((0, 10))) == Command(release=0)
    monitor.update(progress((0, 10), (0, 10)))
    monitor.end()
    assert calls.names == [
        "on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end",
        "on_train_batch_begin", "on_train_batch_end", "on_epoch_end",
        "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end",
        "on_train_end",
    ]  # fmt: skip
    assert logs == [(0, {"loss": 2.0}), (1, {"loss": 2.0})]
    assert sink.history.epoch == [0, 1]
    assert sink.history.history == {"loss": [2.0, 2.0]}


def test_schedulers_and_stops_reach_the_workers() -> None:
    model = make_model()
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 / 2**epoch)
    stop = keras.callbacks.EarlyStopping("loss", patience=1)
    sink = CallbackSink(model, [rates, stop], epochs=9, verbose=0)
    monitor = FitMonitor(sink, [], partial(metric_results, model), epochs=9, first_epoch=0)
    monitor.begin()
    assert monitor.update(progress((0, 10))) == Command(learning_rate=0.25, release=0)
    assert monitor.update(progress((0, 10), (0, 10))) == Command(stop=True, release=1)
    assert (monitor.stopped, monitor.epochs_done) == (True, 2)


def test_without_callbacks_there_is_a_history_and_no_batch_event() -> None:
    model = make_model()
    sink = CallbackSink(model, None, epochs=1, verbose=0)
    assert not sink.has_callbacks
    assert not sink.wants_progress
    model.stop_training = True  # of an earlier fit
    for event in (
        TrainingBegan(0, 1), EpochBegan(0),
        EpochEnded(0, 2, 2, metrics={"loss": 1.0, "f1": [0.5, 0.25]}),
    ):  # fmt: skip
        sink.handle(event)
    assert not sink.stop_wanted
    assert sink.history.history == {"loss": [1.0], "f1": [[0.5, 0.25]]}


def test_a_rate_is_read_through_wrappers_and_not_from_a_schedule() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25))
    for optimizer, rate in (
        (keras.optimizers.SGD(schedule), None), (scaled, 0.25), (keras.optimizers.SGD(0.5), 0.5),
    ):  # fmt: skip
        assert CallbackSink(make_model(optimizer), None, epochs=1, verbose=0).learning_rate == rate


class Two(keras.metrics.Metric):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(y_true))

    def result(self) -> Any:
        total = keras.ops.convert_to_tensor(self.total)
        return {"u": total, "v": -total}


def test_a_metric_that_is_a_dict_of_values_counts_as_several() -> None:
    model = make_model()
    model.compile("sgd", "mse", metrics=[Two(name="two")])
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    names = set(model.fit(x, y, verbose=0).history)
    results = metric_results(model, np.array([8.0, 4.0, 3.0]))
    assert results == {"loss": 2.0, "u": 3.0, "v": -3.0}
    assert set(results) == names
