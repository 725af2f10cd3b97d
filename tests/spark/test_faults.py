"""Some cells of the fault matrix, each with a driver and a cluster of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
from faulty import python_workers

from sparkdl import SparkModel
from sparkdl.layers import ServedEmbedding

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = BENCHMARKS / "faults.py"


class _KillsAmid(keras.callbacks.Callback):
    """Kills a Python worker that trains, some time after the third epoch has ended."""

    def __init__(self, *, never: bool = False) -> None:
        super().__init__()
        self.never = never
        self.killed: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2 and not self.never:
            timer = threading.Timer(0.3, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        for process in python_workers():
            with contextlib.suppress(psutil.Error):
                process.kill()
                self.killed.append(process.pid)
                return


@pytest.mark.tries_again
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "allreduce"])
def test_every_row_counts_as_often_as_every_other_after_a_killed_worker(
    spark: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in synchronous: 25 to 27 times against 33 to 35 times of 30; nothing said so."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "support"))
    import fault_counts

    fault, epochs = _KillsAmid(), 10
    spark_model = fault_counts.make_spark_model("count-worker", mode)
    spark_model.fit(
        fault_counts.make_frame(spark, mode), epochs=epochs, verbose=0, callbacks=[fault]
    )
    assert fault.killed
    counted = fault_counts.found(spark_model.model, epochs)
    assert (counted["rows_off"], counted["least"], counted["most"]) == (0, epochs, epochs)


def _optimizer(name: str) -> Any:
    made = keras.optimizers
    rate = made.schedules.ExponentialDecay(0.01, 100, 0.9)
    return {
        "sgd": lambda: made.SGD(0.05),
        "momentum": lambda: made.SGD(0.01, momentum=0.9, nesterov=True),
        "adam": lambda: made.Adam(0.01),
        "adamw": lambda: made.AdamW(rate, weight_decay=0.01),
        "averages": lambda: made.Adam(0.01, use_ema=True, ema_overwrite_frequency=7),
        "accumulation": lambda: made.Adam(0.01, gradient_accumulation_steps=3),
        "sliced": lambda: made.Adam(0.01),
        "scaled": lambda: made.LossScaleOptimizer(made.Adam(0.01), initial_scale=64.0),
    }[name]()


def _model(optimizer: str) -> Any:
    """With dropout and running statistics, or with rows in a table."""
    keras.utils.set_random_seed(1)
    layers, x = keras.layers, keras.Input((4,))
    if optimizer == "table":
        ids = keras.ops.cast(keras.ops.abs(x) * 50.0, "int32")
        hidden = ServedEmbedding(
            4, table="t", combiner="sum", optimizer=keras.optimizers.Adagrad(0.1)
        )(ids)
        optimizer = "adam"
    else:
        hidden = layers.BatchNormalization()(layers.Dense(16, "relu")(x))
    model = keras.Model(x, layers.Dense(1)(layers.Dropout(0.2)(hidden)))
    model.compile(_optimizer(optimizer), "mse")
    return model


def _trained(
    spark: Any, mode: str, optimizer: str, callbacks: list[Any], folder: Path
) -> list[Any]:
    """All variables, of the optimizer too, and rows of tables, after a fit."""
    from pyspark.sql import functions as F

    model = _model(optimizer)
    inputs = [F.sin(F.col("id") * (n + 1.5)).cast("float") for n in range(4)]
    frame = spark.range(0, 8192, 1, 4).select(
        F.array(*inputs).alias("features"), (inputs[0] * inputs[1]).alias("label")
    )
    rule = "sliced" if optimizer == "sliced" else None
    spark_model = SparkModel(model, mode, num_workers=2, batch_size=16, rule=rule)
    options = {"checkpoint_dir": str(folder)} if optimizer == "table" else {}
    spark_model.fit(frame, epochs=8, verbose=0, callbacks=callbacks, **options)
    found = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]
    return [*found, *(t.pull(np.arange(50)) for t in spark_model.tables.values())]


SLOW_BITS = [
    (mode, name)
    for mode in ("synchronous", "allreduce")
    for name in ("sgd", "momentum", "adam", "adamw", "averages", "accumulation", "scaled", "table")
    if (mode, name) != ("synchronous", "adamw")
]
SLOW_BITS.append(("allreduce", "sliced"))  # whose rule keeps multiples of what Keras' variables are


@pytest.mark.tries_again
@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [("synchronous", "adamw"), *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW_BITS)],
)
def test_every_variable_has_the_bits_of_an_undisturbed_fit(
    spark: Any, mode: str, optimizer: str, tmp_path: Path
) -> None:
    """Before, in synchronous with Adam: one step more in the optimizer, weights 2e-4 off."""
    fault = _KillsAmid()
    killed = _trained(spark, mode, optimizer, [fault], tmp_path / "killed")
    assert fault.killed
    never = _KillsAmid(never=True)
    undisturbed = _trained(spark, mode, optimizer, [never], tmp_path / "undisturbed")
    differ = [i for i, (a, b) in enumerate(zip(killed, undisturbed, strict=True))
              if a.tobytes() != b.tobytes()]  # fmt: skip
    assert differ == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_every_variable_has_the_bits_on_other_backends(backend: str, mode: str) -> None:
    wanted = f"bits_of_an_undisturbed and {mode}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-m", "", "-k", wanted],
        env={**os.environ, "KERAS_BACKEND": backend}, capture_output=True, text=True, timeout=580,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{8 + (mode == 'allreduce')} passed" in done.stdout


SLOW = (
    "kill-driver/mid/allreduce", "kill-jvm/mid/asynchronous", "stopped-context/mid/synchronous",
    "count-twice/amid/synchronous", "count-both/amid/synchronous", "count-silent/amid/synchronous",
    "count-checkpoint/checkpoint/synchronous", "count-third/amid/synchronous",
    "count-executor/amid/asynchronous", "count-executor/amid/allreduce",
    "count-executor/amid/synchronous", "count-executor-shuffled/amid/asynchronous",
    "kill-pair-shard/mid/synchronous", "stop-pair-long/mid/hogwild",
    "memory-executor/any/allreduce", "readonly-tmp/any/asynchronous",
    "clock-forward/mid/synchronous",
)  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=pytest.mark.slow) for c in SLOW],
)
def test_a_cell_holds(cell: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--results", str(tmp_path / "results"), "--only", cell],
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="makes network namespaces")
@pytest.mark.parametrize(
    "arguments", [("connect", "--rounds", "100"), ("stream", "--minutes", "1.5"), ("link",)]
)
def test_what_lasts(arguments: tuple[str, ...]) -> None:
    """Shorter than the runs of the page."""
    program = BENCHMARKS / "support" / "fault_long.py"
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    if "PermissionError" in done.stderr:
        pytest.skip("network namespaces need root")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
