"""Keras callbacks as a sink: they see a fit's events as those of Keras' own fit."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.callback_sink import (
    BATCH_EVENTS,
    VALIDATION_EVENTS,
    CallbackSink,
    acts_on,
    may_act,
    require_directions,
    warn_of_waiting_in_vain,
)
from sparkdl.learner.state.metric_state import metric_results
from sparkdl.progress.events import (
    EpochBegan,
    EpochEnded,
    EpochProgress,
    RunProgress,
    TrainingBegan,
)
from sparkdl.progress.monitor import Command, FitMonitor


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


def test_a_callback_that_would_wait_for_validation_in_vain_is_told_of() -> None:
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss"),
        keras.callbacks.ReduceLROnPlateau("val_accuracy"),
        keras.callbacks.ModelCheckpoint("m.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint("m.keras"),
        keras.callbacks.EarlyStopping("loss"),
    ]
    with pytest.warns(RuntimeWarning, match="without validation_data") as told:
        warn_of_waiting_in_vain(callbacks, validates=False)
    assert [str(w.message).split()[0] for w in told] == [
        "EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_waiting_in_vain(callbacks, validates=True)


def test_a_callback_that_would_fail_at_the_first_epoch_is_refused_before() -> None:
    model = make_model()
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    kinds = keras.callbacks
    failing = kinds.EarlyStopping("val_auc")
    with pytest.raises(ValueError, match="monitor=val_auc"):  # plain Keras, after an epoch
        model.fit(x, y, verbose=0, callbacks=[failing])
    with pytest.raises(ConfigError, match=r"(?s)'val_auc'.*'loss', 'mae'.*mode='max'"):
        require_directions([failing], model)
    fine = [
        kinds.EarlyStopping("val_mae"), kinds.EarlyStopping("val_auc", mode="max"),
        kinds.ReduceLROnPlateau("loss"), kinds.ModelCheckpoint("m.keras", "val_auc"),
        kinds.Callback(),
    ]  # fmt: skip
    require_directions(fine, model)
    assert fine[0].monitor_op is None  # it finds out by itself, as ever


def test_which_callbacks_make_workers_wait() -> None:
    kinds = keras.callbacks
    reading = [
        kinds.CSVLogger("x"), kinds.TerminateOnNaN(), kinds.EarlyStopping("loss"), kinds.Callback(),
    ]  # fmt: skip
    assert not any(map(may_act, reading))
    acting = [
        kinds.EarlyStopping("loss", restore_best_weights=True), kinds.ModelCheckpoint("x.keras"),
        kinds.LambdaCallback(on_epoch_end=print), kinds.ReduceLROnPlateau("loss"), Calls(),
    ]  # fmt: skip
    assert all(map(may_act, acting))
    assert acts_on(BATCH_EVENTS, kinds.LambdaCallback(on_train_batch_end=print))
    assert not acts_on(BATCH_EVENTS, kinds.ReduceLROnPlateau("loss"))


def test_validation_the_last_batch_and_the_end_are_seen_with_their_logs() -> None:
    seen: list[tuple[str, Any]] = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((f"batch {batch}", logs))
            assert self.params["steps"] == 10

        def on_test_begin(self, logs: Any = None) -> None:
            seen.append(("test begins", logs))

        def on_test_end(self, logs: Any = None) -> None:
            seen.append(("test ends", logs))

        def on_train_end(self, logs: Any = None) -> None:
            seen.append(("train ends", logs))

    model = make_model()
    sink = CallbackSink(model, [Sees()], epochs=1, verbose=0)
    monitor = FitMonitor(sink, [], partial(metric_results, model), epochs=1, first_epoch=0)
    monitor.begin()
    epoch = EpochProgress(0, 10, 40, np.array([80.0, 40.0]), np.array([12.0, 4.0]))
    monitor.update(RunProgress({0: epoch}, 10, 40, 2))
    monitor.end()
    assert seen == [
        ("batch 9", {"loss": 2.0}), ("test begins", {}), ("test ends", {"loss": 3.0}),
        ("train ends", {"loss": 2.0, "val_loss": 3.0}),
    ]  # fmt: skip


def test_a_nan_in_a_short_epoch_stops() -> None:
    model = make_model()
    sink = CallbackSink(model, [keras.callbacks.TerminateOnNaN()], epochs=3, verbose=0)
    monitor = FitMonitor(sink, [], partial(metric_results, model), epochs=3, first_epoch=0)
    monitor.begin()
    epoch = EpochProgress(0, 1, 4, np.array([np.nan, 4.0]), np.empty(0))
    assert monitor.update(RunProgress({0: epoch}, 1, 4, 1)) == Command(stop=True, release=0)


def writing_monitor(callback: Any, *, waits: bool = True) -> tuple[Any, FitMonitor]:
    model = make_model(keras.optimizers.SGD(0.5, momentum=0.9))
    model.optimizer.build(model.trainable_variables)
    sink = CallbackSink(model, [callback], epochs=3, verbose=0, waits=waits)
    monitor = FitMonitor(sink, [], partial(metric_results, model), epochs=3, first_epoch=0)
    monitor.begin()
    monitor.watch(lambda: model.layers[0].kernel.assign(np.full((2, 1), 5.0)))  # it was trained
    return model, monitor


def test_what_is_written_goes_with_the_release_and_what_is_loaded_does_not() -> None:
    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            bias = self.model.layers[0].bias
            bias.assign(bias + 1)

    model, monitor = writing_monitor(Halves())
    command = monitor.update(progress((0, 10)))
    assert command is not None
    assert command.release == 0
    assert command.changes is not None
    assert {k: v.tolist() for k, v in command.changes.model.items()} == {1: [1.0]}
    assert dict(command.changes.offsets) == {1: 2}
    model.layers[0].bias.assign([0.0])  # a stage that begins again loads the epoch's state
    monitor.loaded_again(1)
    assert model.layers[0].bias.numpy().tolist() == [1.0]


def test_weights_that_are_written_where_they_are_old_are_an_error() -> None:
    class Clips(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].kernel.assign(np.zeros((2, 1)))

    _, monitor = writing_monitor(Clips(), waits=False)
    with pytest.raises(ModelError, match="take turns"):
        monitor.update(progress((0, 10)))

    clips = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clip())
    model, monitor = writing_monitor(clips)

    def clip() -> None:
        model.layers[0].kernel.assign(np.zeros((2, 1)))

    with pytest.raises(ModelError, match="at a batch's"):
        monitor.update(progress((1, 5)))


def test_what_is_written_for_the_validation_alone_is_an_error() -> None:
    """Keras evaluates what ``on_test_begin`` writes; the workers have evaluated before it."""
    model = make_model()

    class Swaps(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            self.kept = self.model.get_weights()
            self.model.set_weights([np.zeros_like(weights) for weights in self.kept])

        def on_test_end(self, logs: Any = None) -> None:
            self.model.set_weights(self.kept)

    def ended(callback: Any) -> None:
        sink = CallbackSink(model, [callback], epochs=1, verbose=0)
        sink.model_sent()
        monitor = FitMonitor(sink, [], partial(metric_results, model), epochs=1, first_epoch=0)
        monitor.begin()
        epoch = EpochProgress(0, 10, 40, np.array([80.0, 40.0]), np.array([12.0, 4.0]))
        monitor.update(RunProgress({0: epoch}, 10, 40, 2))

    assert acts_on(VALIDATION_EVENTS, Swaps())
    assert not acts_on(VALIDATION_EVENTS, keras.callbacks.ReduceLROnPlateau("val_loss"))
    with pytest.raises(ModelError, match="for the validation") as caught:
        ended(Swaps())
    assert "kernel" in caught.value.received
    ended(Calls())
