"""Learning rates that callbacks set: the driver's are plain Keras', and the workers train at them.

The driver's monitor, run and model are those of the product; servers and ranks are threads.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from harness import global_batches, split

from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import LoopSettings
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.callback_sink import CallbackSink
from sparkdl.learner.state.metric_state import metric_results
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.progress.monitor import FitMonitor
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP, make_rule
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.spark.fit.training import FitStage
from sparkdl.spark.fit.training_run import AllReduceRun, ServerRun
from sparkdl.testing.inproc import InprocParameterServer, InprocServer, connect_threads
from sparkdl.worker import train

EPOCHS, BATCH = 6, 8
MODES = ("asynchronous", "hogwild", "synchronous", "allreduce")
SIZES = [72, 56]


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 12)).astype("float32")
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int32") + (x[:, 3] > 1)


def make_model() -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((12,)), *layers])
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9), "sparse_categorical_crossentropy")
    return model


class Rates(keras.callbacks.Callback):
    """Notes the rate in which each epoch ends, before other callbacks change it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.optimizer.learning_rate))


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "relative": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "absolute": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.3 / (1 + epoch)),
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, min_delta=100.0
    ),
}


class Ranks:
    """Ranks as threads, as far as the driver watches them; each notes its rates."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(w,)) for w in work]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def wait(self, seconds: float) -> bool:
        self._threads[0].join(seconds)
        if self._errors:
            faulthandler.dump_traceback(all_threads=True)  # where the other rank was
            raise self._errors[0]
        return not any(t.is_alive() for t in self._threads)


def fit(mode: str, callbacks: list[Any]) -> SimpleNamespace:
    """The driver's model, and the rate of each rank's steps by epoch."""
    parts = split(*data(), SIZES)
    model = make_model()
    model.evaluate(*parts[0], verbose=0)  # Keras makes the metrics
    trained = TrainedModel(model, keeps_rate=True)
    sink = CallbackSink(model, callbacks, epochs=EPOCHS, verbose=0)
    values = partial(metric_results, model)
    monitor = FitMonitor(sink, [], values, epochs=EPOCHS, first_epoch=0)
    monitor.begin()
    archive = encode_model(model)
    learners = [make_learner(decode_model(archive)) for _ in parts]
    layout = model_layout(model)
    steps: list[list[tuple[int, float]]] = [[] for _ in parts]
    exact = mode in ("synchronous", "allreduce")
    settings = LoopSettings(
        EPOCHS, batch_size=BATCH, window=1, shuffle=False, wait_for_driver=exact, keep_state=True
    )

    def loop(rank: int, synchronizer: Any) -> None:
        taken = synchronizer.train

        def noted(learner: Any, stack: Any, report: Any) -> None:
            steps[rank].append((report.epoch, learner.optimizer.learning_rate))
            taken(learner, stack, report)

        synchronizer.train = noted
        rows = rows_from_numpy(*parts[rank])
        batches = Batches(rows, BATCH, shuffle=False, rank=rank)
        train(
            learners[rank], synchronizer, batches, settings, num_rows=len(rows),
            num_workers=len(parts),
        )  # fmt: skip

    def follow(run: Any, work: Callable[[int], None]) -> None:
        monitor.watch(lambda: trained.take(run.state()))
        ranks: Any = Ranks([partial(work, rank) for rank in range(len(parts))])
        plan: Any = SimpleNamespace(trained=trained, checkpoints=None)
        stage = FitStage(plan, run, None, monitor)  # type: ignore[arg-type]
        stage._watch(ranks)
        stage._last_epochs()
        trained.take(run.state())
        run._driver.close()

    if mode == "allreduce":
        communicators = connect_threads(len(parts))
        with InprocServer(Coordinator(Settings(len(parts)))) as host:

            def in_step(rank: int) -> None:
                with host.session(rank) as session:
                    loop(rank, AllReduceSynchronizer(communicators[rank], layout, session))

            driver: Any = SimpleNamespace(driver=host.driver())
            follow(AllReduceRun(driver, None, len(parts)), in_step)  # type: ignore[arg-type]
        for communicator in communicators:
            communicator.close()
    else:
        rules = {"asynchronous": "adag", "hogwild": "hogwild"}
        rule = BSP() if exact else make_rule(rules[mode]).bind(len(parts))
        server_config = ServerConfig(layout, rule, len(parts))
        with InprocParameterServer(server_config, read_model(model, layout)) as server:

            def through_server(rank: int) -> None:
                with server.client(rank) as client:
                    loop(rank, ServerSynchronizer(rule, client, layout, False))

            process: Any = SimpleNamespace(check=lambda: None)
            strategy: Any = SimpleNamespace(rule=rule)
            run = ServerRun(process, strategy, len(parts))
            run._connected = server.driver()
            follow(run, through_server)
    return SimpleNamespace(model=model, steps=steps, monitor=monitor)


@cache
def fit_with_scheduler(mode: str, name: str) -> tuple[SimpleNamespace, list[float]]:
    """:func:`fit` and the rates that its callbacks saw; one fit for all tests that look at it."""
    rates = Rates()
    return fit(mode, [rates, SCHEDULERS[name]()]), rates.seen


@cache
def rates_of_keras(name: str) -> list[float]:
    """The rates of plain Keras; the same for every mode."""
    rates = Rates()
    callbacks = [rates, SCHEDULERS[name]()]
    make_model().fit(*data(), batch_size=16, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return rates.seen


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=[pytest.mark.slow] * (m == "hogwild")) for m in MODES]
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_callbacks_see_the_rates_of_plain_keras(mode: str, name: str) -> None:
    expected = rates_of_keras(name)
    assert len(set(expected)) >= EPOCHS - 1
    result, seen = fit_with_scheduler(mode, name)
    assert seen == expected
    if mode in ("synchronous", "allreduce"):
        for steps in result.steps:
            assert {epoch for epoch, _ in steps} == set(range(EPOCHS))
            assert all(rate == expected[epoch] for epoch, rate in steps)
    else:  # workers hear of a rate when they can; none goes back to an older one
        compiled = float(make_model().optimizer.learning_rate)
        for steps in result.steps:
            heard = [rate for _, rate in steps]
            first = next((i for i, rate in enumerate(heard) if rate != compiled), len(heard))
            places = [expected.index(rate) for rate in heard[first:]]
            assert places == sorted(places)


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_exact_modes_stay_one_process_with_a_scheduler(mode: str, name: str) -> None:
    result, _ = fit_with_scheduler(mode, name)
    alone = make_model()
    for rate in rates_of_keras(name):
        alone.optimizer.learning_rate = rate
        for x, y in global_batches(split(*data(), SIZES), BATCH):
            alone.train_on_batch(x, y)
    for mine, known in zip(result.model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, known, rtol=0, atol=1e-5)


def test_a_checkpoint_has_the_rate_from_before_the_next_epoch(tmp_path: Any) -> None:
    """Its resume begins the next epoch again: a relative schedule must not be applied twice."""
    from sparkdl.files.checkpoints import Checkpoints

    model = make_model()
    model.optimizer.build(model.trainable_variables)
    sink = CallbackSink(model, [SCHEDULERS["relative"]()], epochs=EPOCHS, verbose=0)
    monitor = FitMonitor(sink, [], lambda state: {"loss": 1.0}, epochs=EPOCHS, first_epoch=0)
    monitor.begin()
    assert monitor.rate_between_epochs is None
    monitor._end_epoch(_epoch(), SimpleNamespace(batches_per_epoch=1, staleness=0.0), None)
    assert monitor.rate_between_epochs == pytest.approx(0.1)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    checkpoints = Checkpoints.at(str(tmp_path))
    assert checkpoints is not None
    TrainedModel(model).save(checkpoints, 1, monitor.rate_between_epochs)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    other = make_model()
    TrainedModel(other).restore(checkpoints)
    assert float(other.optimizer.learning_rate) == pytest.approx(0.1)


def _epoch() -> Any:
    return SimpleNamespace(
        metrics=np.zeros(2), val_metrics=np.empty(0), seconds=1.0, rows=1, batches=1
    )
