"""Submitted to YARN: one case in which something goes wrong.

    spark-submit ... yarn_faults.py RESULT.json FOLDER CASE [ARGUMENTS]

``CASE`` is a function below. What it returns is written to RESULT.json; what it leaves in FOLDER
tells the test how far it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import sparkdl
from sparkdl.progress.events import EpochEnded, Event
from sparkdl.tracking import JsonLines, TensorBoard

ROWS = 512


def make_model(units: int = 8) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def make_rows(spark: SparkSession) -> DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], "float32")
    rows = [(a.tolist(), float(b)) for a, b in zip(x, y, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label float")


def error_of(call: Callable[[], object]) -> dict[str, Any]:
    """The error that a call raises, its warnings, and how long that took."""
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            found: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
        else:
            found = {"type": None, "text": ""}
    found["warnings"] = [str(one.message) for one in told]
    return found | {"seconds": time.monotonic() - began}


class Slowly(keras.callbacks.Callback):
    """Makes each epoch last a while, and leaves ``epoch-N`` in the folder after the epoch N."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__()
        self._folder, self._seconds = folder, seconds

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        (self._folder / f"epoch-{epoch}").touch()
        time.sleep(self._seconds)


def lost(spark: SparkSession, folder: Path, mode: str, epochs: str = "6") -> dict[str, Any]:
    """A fit during which the test takes containers away."""
    options: dict[str, Any] = {"communicator": "builtin"} if mode == "allreduce" else {}
    spark_model = sparkdl.SparkModel(make_model(), mode=mode, num_workers=2, **options)
    frame = make_rows(spark).repartition(2).cache()
    (folder / "application").write_text(spark.sparkContext.applicationId)
    ended: list[tuple[int, int]] = []

    def note(event: Event) -> None:
        if isinstance(event, EpochEnded):
            ended.append((event.epoch, event.rows))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = spark_model.fit(
            frame, epochs=int(epochs), batch_size=16, verbose=0, callbacks=[Slowly(folder, 2.0)],
            sinks=[note],
        )  # fmt: skip
    return {
        "ended": [epoch for epoch, _ in ended],
        "rows": [rows for _, rows in ended],
        "loss": history.history["loss"],
        "warnings": [str(one.message) for one in told],
        "weights": [w.tolist() for w in spark_model.model.get_weights()],
    }


def memory(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """More memory than the overhead allows: in a function, and in a fit."""

    def hold() -> int:
        kept = np.ones(1 << 28, "float32")  # 1 GiB, touched
        time.sleep(60)
        return len(kept)

    large = sparkdl.SparkModel(make_model(units=6_000_000), num_workers=1)
    return {
        "run": error_of(lambda: sparkdl.run(hold, num_workers=1)),
        "fit": error_of(lambda: large.fit(make_rows(spark), epochs=3, verbose=0)),
    }


def attempts(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """A driver that is killed in the third of four epochs; the next one begins that again."""
    attempt = len(list(folder.glob("attempt-*"))) + 1
    (folder / f"attempt-{attempt}").touch()

    class Killed(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            with (folder / "epochs").open("a") as file:
                file.write(f"{attempt}:{epoch} ")
            if attempt == 1 and epoch == 2:
                os.kill(os.getppid(), signal.SIGKILL)  # the application master
                time.sleep(60)

    spark_model = sparkdl.SparkModel(make_model(), mode="synchronous", num_workers=2)
    history = spark_model.fit(
        make_rows(spark), epochs=4, batch_size=16, verbose=0, callbacks=[Killed()],
        checkpoint_dir="/attempts", resume=True,
    )  # fmt: skip
    return {
        "attempt": attempt,
        "loss": history.history["loss"],
        "weights": [w.tolist() for w in spark_model.model.get_weights()],
    }


def dynamic(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Dynamic allocation: no executor at the start; which modes train, and what others say."""
    frame = make_rows(spark)
    found: dict[str, Any] = {"losses": {}}

    def fit(mode: str) -> None:
        spark_model = sparkdl.SparkModel(make_model(), mode=mode, num_workers=2)
        history = spark_model.fit(frame, epochs=2, batch_size=16, verbose=0)
        found["losses"][mode] = history.history["loss"]

    for mode in ("asynchronous", "hogwild", "synchronous", "allreduce"):
        found[mode] = error_of(lambda mode=mode: fit(mode))
    found["run"] = error_of(lambda: sparkdl.run(os.getpid, num_workers=2))
    checks = sparkdl.doctor(spark, mode="allreduce", num_workers=2).to_dict()["checks"]
    found["doctor"] = {check["name"]: check for check in checks}
    return found


def kept(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Shuffled rows outlive all executors; a fit of them asks for new ones."""
    context = spark.sparkContext

    def tell(pair: tuple[int, Any]) -> tuple[int, Any]:
        with (folder / "mapped").open("a") as file:
            file.write("x")
        return pair

    rows = make_rows(spark).collect()
    pairs = [(i, (np.array(one.features, "float32"), one.label)) for i, one in enumerate(rows)]
    shuffled = context.parallelize(pairs, 2).map(tell).partitionBy(2)
    counted = shuffled.count()
    memory = context._jsc.sc().getExecutorMemoryStatus  # the driver is one of them
    deadline = time.monotonic() + 60
    while memory().size() > 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    left = memory().size() - 1
    spark_model = sparkdl.SparkModel(make_model(), mode="asynchronous", num_workers=2)
    history = spark_model.fit(shuffled.values(), epochs=2, batch_size=16, verbose=0)
    return {
        "counted": counted,
        "executors left": left,
        "mapped": len((folder / "mapped").read_text()),
        "loss": history.history["loss"],
        "all-reduce": error_of(
            lambda: sparkdl.SparkModel(make_model(), mode="allreduce", num_workers=2).fit(
                make_rows(spark), verbose=0
            )
        ),
    }


def files(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Folders of HDFS that this user may not write, or that are full."""
    frame = make_rows(spark).repartition(2).cache()

    def fitted(**options: Any) -> sparkdl.SparkModel:
        spark_model = sparkdl.SparkModel(make_model(), num_workers=2)
        spark_model.fit(frame, epochs=1, verbose=0, **options)
        return spark_model

    trained = fitted()
    return {
        "denied checkpoints": error_of(lambda: fitted(checkpoint_dir="/private/checkpoints")),
        "denied model": error_of(lambda: trained.save("hdfs:///private/model.keras")),
        "denied read": error_of(lambda: sparkdl.load_spark_model("/private/model.keras")),
        "denied data": error_of(lambda: fit_of(spark, "/private/rows.parquet")),
        "full checkpoints": error_of(lambda: fitted(checkpoint_dir="hdfs:///full/checkpoints")),
        "full model": error_of(lambda: trained.save("/full/model.keras")),
        "many checkpoints": error_of(lambda: fitted(checkpoint_dir="/many/checkpoints")),
        "many model": error_of(lambda: trained.save("hdfs:///many/model.keras")),
        "denied lines": error_of(lambda: fitted(sinks=[JsonLines("/private/runs")])),
        "denied board": error_of(lambda: fitted(sinks=[TensorBoard("hdfs:///private/board")])),
        "full lines": error_of(lambda: fitted(sinks=[JsonLines("hdfs:///full/runs")])),
        "full board": error_of(lambda: fitted(sinks=[TensorBoard("/full/board")])),
        "many lines": error_of(lambda: fitted(sinks=[JsonLines("/many/runs")])),
        "missing": error_of(lambda: sparkdl.load_spark_model("/nowhere/model.keras")),
    }


def fit_of(spark: SparkSession, path: str) -> None:
    sparkdl.SparkModel(make_model(), num_workers=2).fit(spark.read.parquet(path), verbose=0)


def resources(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Executors of two cores: a worker that asks for both has an executor for itself."""
    frame = make_rows(spark)
    found: dict[str, Any] = {"workers": {}}
    for mode in ("synchronous", "allreduce"):
        spark_model = sparkdl.SparkModel(make_model(), mode=mode, resources={"cpus": 2})
        spark_model.fit(frame, epochs=1, batch_size=64, verbose=0)
        assert spark_model.summary is not None
        found["workers"][mode] = len(spark_model.summary.rank_rows)
    spark_model = sparkdl.SparkModel(make_model(), resources={"fpga": 1})
    found["unknown"] = error_of(lambda: spark_model.fit(frame, verbose=0))
    return found


def short(spark: SparkSession, folder: Path, mode: str, name: str) -> dict[str, Any]:
    """A fit that leaves ``trains-NAME``, and goes on until the test leaves ``go-NAME``."""

    class Held(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            (folder / f"trains-{name}").touch()
            deadline = time.monotonic() + 120
            while not (folder / f"go-{name}").exists() and time.monotonic() < deadline:
                time.sleep(0.1)

    spark_model = sparkdl.SparkModel(make_model(), mode=mode, num_workers=1)
    history = spark_model.fit(
        make_rows(spark), epochs=2, batch_size=16, verbose=0, callbacks=[Held()]
    )
    context = spark.sparkContext
    return {"loss": history.history["loss"], "user": context.sparkUser(),
            "queue": context.getConf().get("spark.yarn.queue", "default")}  # fmt: skip


def gpus(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """The GPUs that Spark gives to ranks, as a discovery script names them."""

    def given() -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    return {"given": sparkdl.run(given, num_workers=2)}


def stage_gpus(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """GPUs for the training stage only: the tasks of other stages have none."""

    def given(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            names = [sorted(context.resources())] * batch.num_rows
            yield pa.record_batch([pa.array(names, pa.list_(pa.string()))], ["names"])

    frame = make_rows(spark).repartition(2).mapInArrow(given, "names array<string>")
    found: dict[str, Any] = {"others": [list(row.names) for row in frame.distinct().collect()]}
    for mode in ("asynchronous", "allreduce"):
        options: dict[str, Any] = {"communicator": "builtin"} if mode == "allreduce" else {}
        spark_model = sparkdl.SparkModel(make_model(), mode, resources={"gpu": 1}, **options)
        spark_model.fit(make_rows(spark), epochs=1, batch_size=64, verbose=0)
        assert spark_model.summary is not None
        found[mode] = sorted(list(gpus) for gpus in spark_model.summary.gpus.values())
    return found


CASES = (
    lost, memory, attempts, dynamic, kept, files, short, gpus, stage_gpus, resources,
)  # fmt: skip


def main() -> None:
    result, folder, case, *arguments = sys.argv[1:]
    spark = SparkSession.builder.appName(f"sparkdl {case}").getOrCreate()
    (function,) = [one for one in CASES if one.__name__ == case]
    found = function(spark, Path(folder), *arguments)
    Path(result).write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
