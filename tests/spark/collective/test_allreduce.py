"""``mode='allreduce'``: one barrier stage, no server; what goes right and what goes wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
from faulty import AtEpoch, Raises, python_workers
from needed import needs_spark
from processes import command_of, maps_of
from scripted import run_script
from spark_models import make_mlp

from sparkdl import Limits, SparkModel
from sparkdl.errors import (
    ConfigError,
    ResourceError,
    UnknownNameError,
    WaitTimeoutError,
    WorkerError,
)


def _has_horovod() -> bool:
    from sparkdl.collective.horovod import unavailable

    return not unavailable()


@pytest.fixture(params=["builtin", "horovod"])
def communicator(request: Any) -> str:
    if request.param == "horovod" and not _has_horovod():
        pytest.skip("Horovod is not installed (make horovod)")
    return str(request.param)


@pytest.mark.oldest
def test_it_learns_and_a_second_fit_goes_on(digits_df: Any, communicator: str) -> None:
    model = make_mlp()
    spark_model = SparkModel(model, "allreduce", num_workers=2, communicator=communicator)
    first = spark_model.fit(digits_df, epochs=4, verbose=0, validation_split=0.2)
    assert len(first.history["loss"]) == len(first.history["val_accuracy"]) == 4
    steps = int(model.optimizer.iterations.numpy())
    second = spark_model.fit(digits_df, epochs=20, verbose=0)
    assert int(model.optimizer.iterations.numpy()) > steps > 0
    assert second.history["loss"][0] < first.history["loss"][-1]
    assert spark_model.evaluate(digits_df)["accuracy"] > 0.95
    assert spark_model.summary is not None
    assert spark_model.summary.transports == {communicator}
    assert spark_model.summary.rows == digits_df.count()


@pytest.mark.skipif(not importlib.util.find_spec("horovod"), reason="make horovod")
def test_auto_takes_the_builtin_communicator_without_gpus(digits_df: Any) -> None:
    spark_model = SparkModel(make_mlp(), "allreduce", num_workers=2)
    spark_model.fit(digits_df, epochs=1, verbose=0)
    assert spark_model.summary is not None
    assert spark_model.summary.transports == {"builtin"}


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.3, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01),
}


def assert_steps_of_one_process(model: Any, digits: Any, optimizer: str, steps: int) -> None:
    """Holds a model that took whole batches to plain Keras on all rows."""
    x, y = digits
    alone = make_mlp(optimizer=OPTIMIZERS[optimizer]())
    alone.fit(x, y, epochs=steps, batch_size=len(x), verbose=0)
    for mine, known in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, known, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("communicator", "optimizer"),
    [
        ("builtin", "momentum"),
        pytest.param("builtin", "adamw", marks=pytest.mark.slow),
        ("horovod", "adam"),
    ],
    indirect=["communicator"],
)
def test_whole_batches_take_the_steps_of_one_process(
    digits_df: Any, digits: Any, communicator: str, optimizer: str
) -> None:
    """With a partition per batch the order of rows does not matter: Keras' own steps are known.

    More cases, without Spark, are in tests/parallel/test_allreduce_exact.py.
    """
    model = make_mlp(optimizer=OPTIMIZERS[optimizer]())
    SparkModel(
        model, "allreduce", num_workers=3, batch_size=len(digits[0]), communicator=communicator
    ).fit(digits_df, epochs=50, verbose=0)
    assert_steps_of_one_process(model, digits, optimizer, 50)


def test_workers_without_rows_take_part(spark: Any, digits: Any) -> None:
    x, y = digits
    frame = spark.createDataFrame(
        [(x[i].tolist(), int(y[i])) for i in range(3)], "features array<float>, label int"
    )
    history = SparkModel(make_mlp(), "allreduce", num_workers=4).fit(frame, epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_callbacks_see_and_steer_the_run(digits_df: Any) -> None:
    class Rates(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[np.ndarray] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen.append(self.model.get_weights()[0])
            self.model.optimizer.learning_rate = 0.0  # from now on nothing moves

    rates = Rates()
    model = make_mlp(optimizer=keras.optimizers.SGD(0.1))
    history = SparkModel(model, "allreduce", num_workers=2).fit(
        digits_df, epochs=10, verbose=0,
        callbacks=[rates, keras.callbacks.EarlyStopping("loss", min_delta=1e-3, patience=1)],
    )  # fmt: skip
    assert len(history.history["loss"]) == 3  # the third shows that nothing moves
    np.testing.assert_array_equal(rates.seen[0], rates.seen[1])
    np.testing.assert_array_equal(rates.seen[1], model.get_weights()[0])


@pytest.mark.parametrize(
    ("mode", "frequency"),
    [
        ("allreduce", "batch"),
        pytest.param("asynchronous", "batch", marks=pytest.mark.slow),
        ("asynchronous", 100),  # a window of several stacks
        pytest.param("synchronous", "batch", marks=pytest.mark.slow),
    ],
)
def test_a_callback_stops_in_the_middle_of_an_epoch(
    digits_df: Any, mode: str, frequency: Any
) -> None:
    class StopsAtOnce(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    repeated = digits_df.unionAll(digits_df)
    for _ in range(4):
        repeated = repeated.unionAll(repeated)
    started = time.monotonic()
    model = make_mlp()
    spark_model = SparkModel(model, mode, frequency=frequency, num_workers=2, batch_size=2)
    history = spark_model.fit(repeated, epochs=50, verbose=0, callbacks=[StopsAtOnce()])
    assert len(history.history["loss"]) == 1
    assert time.monotonic() - started < 60  # one whole epoch would take minutes
    assert not np.array_equal(model.get_weights()[0], make_mlp().get_weights()[0])
    found = spark_model.evaluate(digits_df)
    assert found["loss"] <= history.history["loss"][-1] + 0.1  # what was trained came back
    deadline = time.monotonic() + 20
    while mapping := _mapping("memfd:sparkdl"):
        assert time.monotonic() < deadline, mapping
        time.sleep(0.2)


def _mapping(name: str) -> list[str]:
    """What idle Python workers still map of a run's shared memory."""
    return [line for process in python_workers() for line in maps_of(process) if name in line]


def _training() -> list[psutil.Process]:
    """The Python workers that share a ring's memory now (a server's has another name)."""
    return [p for p in python_workers() if any("memfd:sparkdl " in line for line in maps_of(p))]


def _executor_of(process: psutil.Process) -> psutil.Process:
    return next(p for p in process.parents() if "CoarseGrainedExecutorBackend" in command_of(p))


@pytest.mark.parametrize(
    ("lost", "communicator"),
    [("Python worker", "horovod"), ("executor", "builtin")],
    indirect=["communicator"],
)
def test_a_lost_worker_is_made_up_for(
    digits_df: Any, digits: Any, lost: str, communicator: str
) -> None:
    """The steps are those of a run in which nothing happened: whole batches have known results."""

    def kill() -> None:
        worker = _training()[0]
        (worker if lost == "Python worker" else _executor_of(worker)).kill()

    model = make_mlp(optimizer=OPTIMIZERS["adam"]())
    spark_model = SparkModel(
        model, "allreduce", num_workers=2, batch_size=len(digits[0]), communicator=communicator
    )
    with pytest.warns(RuntimeWarning, match=r"goes on from epoch [3-9] "):
        history = spark_model.fit(digits_df, epochs=20, verbose=0, callbacks=[AtEpoch(2, kill)])
    assert len(history.history["loss"]) == 20
    assert_steps_of_one_process(model, digits, "adam", 20)


class _EndsInItsFirstValidation(keras.layers.Layer):
    """Ends the process of rank 1 once, when rank 0 has long reported its part of the epoch."""

    def __init__(self, flag: str, **options: Any) -> None:
        super().__init__(**options)
        self.flag = flag

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "flag": self.flag}

    def call(self, x: Any, training: bool | None = None) -> Any:
        import tensorflow as tf

        if training:
            return x
        with tf.control_dependencies([tf.py_function(self._end, [], [])]):
            return tf.identity(x)

    def _end(self) -> None:
        from pyspark import TaskContext

        task = TaskContext.get()
        if task is not None and task.partitionId() == 1:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
                time.sleep(2)
                os._exit(1)


@pytest.mark.slow
def test_an_epoch_that_one_rank_did_not_report_ends_with_the_others(
    spark: Any, digits: Any, tmp_path: Path
) -> None:
    x, y = digits
    numbers = spark.range(20).selectExpr("id", "pmod(hash(id), 2) as place").collect()
    many, few = (next(n.id for n in numbers if n.place == place) for place in (0, 1))
    rows = [(x[i].tolist(), int(y[i]), many if i < 400 else few) for i in range(600)]
    frame = spark.createDataFrame(rows, "features array<float>, label int, place long")
    # The first rank has the most rows: it keeps the state. A shuffle has another order each time.
    frame = frame.repartition(2, "place").cache()
    weights = []
    for lost in (True, False):
        flag = tmp_path / "ended"
        if not lost:
            assert flag.exists()  # nothing ends this time
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                _EndsInItsFirstValidation(str(flag)),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
        ended: list[int] = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda e, _, ended=ended: ended.append(e)
        )
        spark_model = SparkModel(model, "allreduce", communicator="builtin", repartition=False)
        expected = pytest.warns(RuntimeWarning, match="goes on from epoch 1 ")
        with expected if lost else contextlib.nullcontext():
            history = spark_model.fit(
                frame, epochs=3, validation_split=0.3, verbose=0, callbacks=[note]
            )
        assert ended == history.epoch == [0, 1, 2]
        assert len(history.history["val_loss"]) == 3
        assert history.history["loss"][0] > history.history["loss"][2] > 0
        weights.append(model.get_weights())
    for mine, other in zip(*weights, strict=True):  # the rows of an epoch come in the same order
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6)
    frame.unpersist()


@pytest.mark.slow  # Spark replaces executors; waiting for that takes its time
def test_with_fewer_slots_fewer_workers_go_on(digits_df: Any, digits: Any) -> None:
    over = threading.Event()

    def kill_and_go_on_killing() -> None:
        kept = _executor_of(_training()[0]).pid
        while not over.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    executor = "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
                    if executor and process.pid != kept:
                        process.kill()

    killer = threading.Thread(target=kill_and_go_on_killing)
    model = make_mlp(optimizer=OPTIMIZERS["adam"]())
    spark_model = SparkModel(model, "allreduce", num_workers=4, batch_size=len(digits[0]))
    try:
        with pytest.warns(RuntimeWarning, match=r"goes on from epoch [3-9] with 2 of 4 workers"):
            spark_model.fit(digits_df, epochs=40, verbose=0, callbacks=[AtEpoch(2, killer.start)])
    finally:
        over.set()
        killer.join()
    assert spark_model.summary is not None
    assert len(spark_model.summary.pids) == 2
    assert_steps_of_one_process(model, digits, "adam", 40)


@pytest.mark.slow
def test_a_worker_that_hangs_is_named(digits_df: Any) -> None:
    stopped: list[psutil.Process] = []

    def stop() -> None:
        stopped.append(_training()[0])
        stopped[0].suspend()

    spark_model = SparkModel(
        make_mlp(), "allreduce", num_workers=2, communicator="builtin",
        limits=Limits(start_timeout_s=10, worker_timeout_s=5),
    )  # fmt: skip
    started = time.monotonic()
    try:
        with pytest.raises(WaitTimeoutError, match=r"missing rank [01]"):
            spark_model.fit(digits_df, epochs=500, verbose=0, callbacks=[AtEpoch(2, stop)])
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.kill()
    assert time.monotonic() - started < 60


def test_without_restarts_a_lost_worker_is_an_error(digits_df: Any) -> None:
    def kill() -> None:
        _training()[0].kill()

    spark_model = SparkModel(make_mlp(), "allreduce", num_workers=2, limits=Limits(max_restarts=0))
    started = time.monotonic()
    with pytest.raises(WorkerError):
        spark_model.fit(digits_df, epochs=500, verbose=0, callbacks=[AtEpoch(1, kill)])
    assert time.monotonic() - started < 60


def test_an_exception_reaches_the_user_within_seconds(digits_df: Any, communicator: str) -> None:
    model = keras.Sequential(
        [keras.Input((64,)), Raises(), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    started = time.monotonic()
    with pytest.raises(WorkerError, match="a custom layer that raises") as caught:
        SparkModel(model, "allreduce", num_workers=2, communicator=communicator).fit(
            digits_df, verbose=0
        )
    assert time.monotonic() - started < 30
    assert "in call" in str(caught.value)


def test_partitions_that_a_barrier_stage_cannot_read_are_named(digits_df: Any) -> None:
    few = digits_df.limit(64)
    joined = few.sparkSession.createDataFrame(few.rdd.repartition(4), few.schema).coalesce(2)
    spark_model = SparkModel(make_mlp(), "allreduce", communicator="builtin", repartition=False)
    with pytest.raises(ResourceError, match=r"(?s)as they are.*coalesce.*repartition=True"):
        spark_model.fit(joined, verbose=0)
    spark_model = SparkModel(make_mlp(), "allreduce", communicator="builtin", num_workers=2)
    assert spark_model.fit(joined, verbose=0).epoch == [0]


def test_what_makes_no_sense_is_refused_before_any_job() -> None:
    model = make_mlp()
    with pytest.raises(UnknownNameError, match="mpi"):
        SparkModel(model, "allreduce", communicator="mpi")
    with pytest.raises(ConfigError, match="no effect"):
        SparkModel(model, "allreduce", parameter_server_mode="http")
    with pytest.raises(ConfigError, match="codec"):
        SparkModel(model, "allreduce", compression="topk")
    with pytest.raises(ConfigError, match="communicator has no effect"):
        SparkModel(model, "asynchronous", communicator="builtin")


def test_halves_on_the_wire(digits_df: Any, communicator: str) -> None:
    spark_model = SparkModel(
        make_mlp(), "allreduce", num_workers=2, compression="fp16", communicator=communicator
    )
    spark_model.fit(digits_df, epochs=20, verbose=0)
    assert spark_model.evaluate(digits_df)["accuracy"] > 0.95


@pytest.mark.slow
def test_workers_that_run_another_backend_train_in_children() -> None:
    assert "OTHER-BACKEND-OK" in run_script("other_backend_fit.py", KERAS_BACKEND="tensorflow")


@needs_spark(4, 0, "its packages have no Connect server")
def test_spark_connect() -> None:
    """In a process of its own: a client that the executors are never told how to reach."""
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    script = Path(__file__).parents[1] / "scripts" / "connect_fit.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "CONNECT OK" in done.stdout
