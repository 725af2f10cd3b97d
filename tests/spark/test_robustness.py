"""What goes wrong on a cluster: each ends in the right model or in one clear error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import psutil
import pytest
from faulty import AtEpoch, Raises, python_workers
from processes import command_of
from spark_models import make_mlp

from sparkdl import SparkModel
from sparkdl.errors import TransportError, WorkerError
from sparkdl.progress.events import EpochEnded


def _server() -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        if "sparkdl.ps.server" in command_of(process):
            return process
    raise AssertionError("no server runs")


def test_an_exception_in_a_worker_reaches_the_user_within_seconds(digits_df: Any) -> None:
    model = keras.Sequential(
        [keras.Input((64,)), Raises(), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    for mode in ("asynchronous", "synchronous"):
        started = time.monotonic()
        with pytest.raises(WorkerError, match="a custom layer that raises") as caught:
            SparkModel(model, mode, num_workers=2).fit(digits_df, verbose=0)
        assert time.monotonic() - started < 100
        assert "in call" in str(caught.value)  # the worker's own traceback
        assert "Traceback on worker" in str(caught.value)


@pytest.mark.tries_again
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_killed_worker_is_replaced_and_the_model_is_right(digits_df: Any, mode: str) -> None:
    killed: list[int] = []

    def kill() -> None:
        workers = python_workers()
        assert workers
        killed.append(workers[0].pid)
        os.kill(workers[0].pid, signal.SIGKILL)

    spark_model = SparkModel(make_mlp(), mode, num_workers=2, batch_size=16)
    history = spark_model.fit(digits_df, epochs=12, verbose=0, callbacks=[AtEpoch(2, kill)])
    assert killed
    assert len(history.history["loss"]) == 12
    assert spark_model.evaluate(digits_df)["accuracy"] > 0.95


def test_a_killed_server_ends_in_one_clear_error(digits_df: Any) -> None:
    killed: list[float] = []

    def kill() -> None:
        os.kill(_server().pid, signal.SIGKILL)
        killed.append(time.monotonic())

    spark_model = SparkModel(make_mlp(), num_workers=2, batch_size=8)
    with pytest.raises(TransportError, match=r"parameter server(.|\n)*exit status -9"):
        spark_model.fit(digits_df, epochs=1000, verbose=0, callbacks=[AtEpoch(1, kill)])
    assert time.monotonic() - killed[0] < 10
    # and the session is as good as new
    assert SparkModel(make_mlp(), num_workers=2).fit(digits_df, verbose=0).history["loss"]


@pytest.mark.parametrize(
    ("mode", "delays"),
    [
        ("asynchronous", (0.05, 0.25, 3.0)),
        ("allreduce", (0.15, 0.4, 3.0)),
        pytest.param("asynchronous", (0.15, 0.4), marks=pytest.mark.slow),
        pytest.param("allreduce", (0.05, 0.25), marks=pytest.mark.slow),
    ],
)
def test_interrupt_ends_the_fit_and_leaves_nothing(
    spark: Any, digits_df: Any, mode: str, delays: tuple[float, ...]
) -> None:
    """Also one that comes before the server is up, or while Keras builds the model."""
    SparkModel(make_mlp(), mode, num_workers=2).fit(digits_df, verbose=0)
    for delay in delays:
        spark_model = SparkModel(make_mlp(), mode, num_workers=2, batch_size=4)
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            spark_model.fit(digits_df, epochs=100_000, verbose=0)
        assert time.monotonic() - started < delay + 10
        timer.join()
        deadline = time.monotonic() + 20
        while spark.sparkContext.statusTracker().getActiveJobsIds():
            assert time.monotonic() < deadline, f"after {delay} s: the job still runs"
            time.sleep(0.05)
    # and the session is as good as new
    assert SparkModel(make_mlp(), mode, num_workers=2).fit(digits_df, verbose=0).history["loss"]


@pytest.mark.parametrize(
    ("mode", "ends"),
    [
        ("asynchronous", "interrupt"),
        ("asynchronous", "cancel"),
        ("synchronous", "interrupt"),
        ("allreduce", "interrupt"),
        ("allreduce", "cancel"),
    ],
)
def test_what_was_trained_until_an_interrupt_is_kept(
    spark: Any, digits_df: Any, mode: str, ends: str
) -> None:
    """As plain Keras keeps it: weights, optimizer state, and the History of whole epochs."""
    model = make_mlp()
    untrained = model.get_weights()
    spark_model = SparkModel(model, mode, num_workers=2)
    trained = threading.Event()

    def note(event: Any) -> None:
        if isinstance(event, EpochEnded) and event.epoch >= 5:
            trained.set()

    def end() -> None:
        trained.wait(60)
        time.sleep(2.5 if ends == "cancel" else 0.3)  # a worker leaves its optimizer's state
        if ends == "cancel":
            spark.sparkContext.cancelAllJobs()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=end)
    thread.start()
    error = WorkerError if ends == "cancel" else KeyboardInterrupt
    with pytest.raises(error):
        spark_model.fit(digits_df, epochs=100_000, verbose=0, sinks=note)
    thread.join()
    assert all((a != b).any() for a, b in zip(untrained, model.get_weights(), strict=True))
    losses = spark_model.history.history["loss"]
    assert len(losses) >= 6
    assert losses[-1] < losses[0]
    steps = int(model.optimizer.iterations.numpy())
    assert steps > 0
    more = spark_model.fit(digits_df, epochs=1, verbose=0).history["loss"]
    assert more[0] < 0.5 * losses[0]  # it goes on from there
    assert int(model.optimizer.iterations.numpy()) > steps


def test_two_fits_at_the_same_time(digits_df: Any) -> None:
    results: dict[int, Any] = {}

    def fit(number: int) -> None:
        results[number] = SparkModel(make_mlp(), num_workers=2).fit(digits_df, epochs=3, verbose=0)

    threads = [threading.Thread(target=fit, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 2
    for history in results.values():
        assert history.history["loss"][-1] < history.history["loss"][0]


def test_more_partitions_than_slots(digits_df: Any) -> None:
    """Six workers take turns on four slots: the asynchronous mode waits for nobody."""
    model = SparkModel(make_mlp(), num_workers=6)
    with pytest.warns(RuntimeWarning, match="6 workers take turns on 4 task slots"):
        history = model.fit(digits_df, epochs=3, validation_split=0.1, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]


class _NoMemory(keras.layers.Layer):
    """Runs out of memory on the first try of all, as on a busy executor."""

    def __init__(self, marker: str, **options: Any) -> None:
        super().__init__(**options)
        self.marker = marker

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "marker": self.marker}

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return x
            raise MemoryError("none left")
        return x


@pytest.mark.tries_again
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_what_another_try_mends_is_tried_again_and_hangs_nobody(
    digits_df: Any, mode: str, tmp_path: Any
) -> None:
    marker = tmp_path / "tried"
    model = keras.Sequential(
        [
            keras.Input((64,)),
            _NoMemory(str(marker)),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = SparkModel(model, mode, num_workers=2).fit(
        digits_df, epochs=3, verbose=0, callbacks=[keras.callbacks.Callback()]
    )
    assert marker.exists()
    assert len(history.history["loss"]) == 3


def test_a_session_that_ends_under_a_job_is_named() -> None:
    """Before: "Spark gave the stage up", and in mode allreduce an error of Py4J at the restart."""
    script = Path(__file__).parent / "scripts" / "lost_session.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False
    )
    assert "LOST SESSION OK" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
