"""One cell of the fault matrix (``faults.py``): a driver, its cluster, one fault in one fit.

Two executors on this machine train a small network; at one moment of the fit the fault comes. What
became of the fit goes to ``report.json`` in the cell's folder, after it to the caller's eyes. A
driver that is killed writes none; ``--resume`` is the driver that goes on in its place.

    python benchmarks/support/fault_cell.py kill-worker exchange asynchronous /tmp/folder
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_counts
import fault_surroundings
import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 8
COPIES = {"asynchronous": 40, "hogwild": 40, "synchronous": 4, "allreduce": 12}
"""Of the 1,797 digits: so many that an epoch takes some tenths of a second, and a fault that is to
come within the fit does. With batches of 16, 4 copies are 224 steps of each of two workers."""
MID_EPOCH, EXCHANGE_EPOCH = 3, 2
LEAST_ACCURACY = 0.95
STOP_S, LONG_STOP_S = 20.0, 30.0
WARM = ("nan", "full-spill", "full-checkpoint")
"""Faults that are there from the beginning: workers have trained before, so that seconds count."""
SMALL = ("full-spill", "full-checkpoint")
"""Faults that have a small file system of their own."""
TABLES, LONG = "-tables", "-long"
"""At the end of a fault whose model has rows in tables; of one that stops something for longer."""
FRAMEWORK_BYTES = 250 << 20
HANG_S = 180.0
"""Without any progress."""


# -- the processes of the cell --------------------------------------------------------------------


def _below(text: str) -> list[psutil.Process]:
    """The processes below this one whose command line has ``text``."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def workers(least_bytes: int = 0) -> list[psutil.Process]:
    """Spark's Python workers with so much memory, the youngest last.

    A daemon on each executor forks them; those that train have a framework in their memory.
    """
    found = []
    for process in _below("pyspark.daemon"):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            forked = parent is not None and "pyspark.daemon" in " ".join(parent.cmdline())
            if forked and process.memory_info().rss >= least_bytes:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def training() -> list[psutil.Process]:
    return workers(FRAMEWORK_BYTES)


def executors() -> list[psutil.Process]:
    return _below("CoarseGrainedExecutorBackend")


def servers() -> list[psutil.Process]:
    return _below("sparkdl.ps.server")


def drivers_jvm() -> psutil.Process:
    return _below("org.apache.spark.deploy.SparkSubmit")[0]


def go_on_later(pid: int, seconds: float) -> None:
    """Lets a stopped process go on, also if this one is dead by then."""
    subprocess.Popen(
        ["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def alive(what: str) -> None:
    """Says what has happened, and puts off the moment at which this process counts as hanging."""
    print(f"{time.monotonic() - _BEGAN:6.1f} s: {what}", flush=True)
    faulthandler.dump_traceback_later(HANG_S, exit=True)


_BEGAN = time.monotonic()

# -- the fault ------------------------------------------------------------------------------------


class Fault:
    """Does one thing at one moment of the fit.

    Args:
        kind: Which, for example ``'kill-worker'``.
        moment: ``'start'`` (the workers are up and import Keras), ``'exchange'`` (one end of an
            exchange waits for the other), ``'mid'`` (after an epoch), ``'amid'`` (in the middle of
            one), ``'checkpoint'`` (while one is written) or ``'end'`` (after the last).
        spark: The session.
    """

    def __init__(self, kind: str, moment: str, spark: Any) -> None:
        self.kind, self.moment, self.spark = kind, moment, spark
        self.at: float | None = None
        self._thread: threading.Thread | None = None

    def fire(self) -> None:
        """Does it, and notes when."""
        self.at = time.monotonic()
        alive(f"{self.kind} now")
        verb, whom = self.kind.split("-", 1)
        if fault_counts.counts(self.kind):
            self._fire_counted(whom)
        elif self.kind == "stopped-context":
            self.spark.stop()
        elif self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif verb == "clock":
            fault_surroundings.jump(whom)
        elif verb in ("kill", "stop"):
            for pid in self._victims(whom):
                if verb == "stop":
                    go_on_later(pid, LONG_STOP_S if whom.endswith(LONG) else STOP_S)
                os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)

    def _victims(self, whom: str) -> list[int]:
        """Whom a fault kills or stops: one process, or a worker and a server (without one, all
        workers) at the same time."""
        name = whom.split("-")[0]
        if name != "pair":
            return [self._victim(name)]
        others = [self._victim("server")] if servers() else [w.pid for w in training()[:-1]]
        return [self._victim("worker"), *others]

    def _fire_counted(self, what: str) -> None:
        """Kills a worker, both, or an executor; or makes one silent for longer than its lease."""
        pids = [worker.pid for worker in training()]
        what = what.removesuffix(fault_counts.SHUFFLED)
        if what == "silent":
            go_on_later(pids[-1], 3 * fault_counts.LEASE_S)
            os.kill(pids[-1], signal.SIGSTOP)
            return
        if what in ("executor", "third"):
            victims = [self._executor_of(pids[-1])]
        else:
            victims = pids if what == "both" else pids[-1:]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _executor_of(pid: int) -> int:
        """The executor in which a worker trains."""
        own = {process.pid for process in executors()}
        return next(p.pid for p in psutil.Process(pid).parents() if p.pid in own)

    def _victim(self, whom: str) -> int:
        if whom == "driver":
            return os.getpid()
        if whom == "jvm":
            return drivers_jvm().pid
        if whom == "worker":
            return (training() or workers())[-1].pid
        if whom == "shard":  # the coordinator is started after those who hold values
            return servers()[0].pid
        return {"executor": executors, "server": servers}[whom]()[0].pid

    def _fire_in_exchange(self) -> None:
        """Stops the other end of the exchanges, waits until the victim waits for it, and fires."""
        time.sleep(0.3)
        victim = self._victim(self.kind.split("-")[1])
        others = [w for w in training() if victim not in {w.pid, *(p.pid for p in w.parents())}]
        for process in servers() or others[-1:] or training()[-1:]:
            go_on_later(process.pid, 0.8)
            process.suspend()
        time.sleep(0.4)
        self.fire()

    def _after(self, seconds: float) -> Callable[[], None]:
        """Fires so much later, in the middle of an epoch."""

        def act() -> None:
            time.sleep(seconds)
            self.fire()

        return act

    def at_start(self) -> None:
        """Waits in the background for the start of the stage, and fires."""

        def wait() -> None:
            while not workers():
                time.sleep(0.1)
            time.sleep(1.0)
            self.fire()

        if self.moment == "start":
            self._begin(wait)

    def _begin(self, action: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=action, name="fault", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun in the background has ended."""
        if self._thread is not None:
            self._thread.join(30)

    def callback(self) -> Any:
        """A Keras callback that fires at the other moments."""
        import keras

        fault = self
        epochs = {
            "exchange": EXCHANGE_EPOCH, "mid": MID_EPOCH, "end": EPOCHS - 1, "amid": EXCHANGE_EPOCH,
            "checkpoint": EXCHANGE_EPOCH,
        }  # fmt: skip
        fired: list[int] = []
        began = [time.monotonic()]

        class AtEpoch(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                alive(f"epoch {epoch} is done")
                took_s, began[0] = time.monotonic() - began[0], time.monotonic()
                again = fault.kind == "count-twice" and epoch == EXCHANGE_EPOCH + 2
                if (epoch != epochs.get(fault.moment) and not again) or (fired and not again):
                    return
                fired.append(epoch)
                if fault.moment == "exchange":
                    act: Callable[[], None] = fault._fire_in_exchange
                elif fault.moment == "amid":
                    act = fault._after(min(took_s, 2.0) / 2)
                elif fault.kind == "stopped-context":  # as from another cell of a notebook
                    act = fault.fire
                else:
                    fault.fire()
                    return
                fault._begin(act)

        return AtEpoch()


# -- the fit --------------------------------------------------------------------------------------


def start_spark(spill_folder: Path | None, executors: int = 2) -> Any:
    """Executors of one core, which spill into a folder."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local-cluster[{executors},1,1024]")
    if spill_folder is not None:
        builder = builder.config("spark.executorEnv.TMPDIR", str(spill_folder))
    for name, value in fault_surroundings.settings().items():
        builder = builder.config(name, value)
    return (
        builder.config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .config("spark.executorEnv.PYTHONPATH", str(ROOT))
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .getOrCreate()
    )


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data / 16.0).astype("float32"), data.target.astype("int64")


def make_frame(spark: Any, kind: str, mode: str) -> Any:
    """The digits, some copies of them; with a NaN in one row for ``nan``, larger for a spill."""
    if fault_counts.counts(kind):
        return fault_counts.make_frame(spark, mode, kind)
    x, y = digits()
    rows = [(x[i].tolist(), int(y[i])) for i in range(len(x))]
    if kind == "nan":
        rows[1000][0][7] = float("nan")
    if kind == "large-metrics":
        rows = [(values, int(digit >= 5)) for values, digit in rows]
    count = 40 if kind == "full-spill" else COPIES[mode]
    if kind.endswith(TABLES):  # each batch of which is exchanged
        count = 6
    copies = spark.range(count).withColumnRenamed("id", "copy")
    frame = spark.createDataFrame(rows, "features array<float>, label int").crossJoin(copies)
    return fault_surroundings.too_large(frame) if kind == "memory-executor" else frame


def make_model_with_table() -> Any:
    """Each pixel's place and value is an id."""
    import keras

    import sparkdl

    keras.utils.set_random_seed(0)
    x = keras.Input((64,))
    places = 17 * np.arange(64, dtype="float32")
    ids = keras.ops.cast(keras.ops.round(x * 16.0) + places, "int32")
    rows = sparkdl.layers.ServedEmbedding(
        16, table="pixels", combiner="sum", optimizer=keras.optimizers.Adagrad(0.1)
    )(ids)
    model = keras.Model(x, keras.layers.Dense(10, activation="softmax")(rows))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def make_model(kind: str) -> Any:
    import keras

    if kind.endswith(TABLES):
        return make_model_with_table()
    keras.utils.set_random_seed(0)
    classes = 1 if kind == "large-metrics" else 10
    last = "sigmoid" if classes == 1 else "softmax"
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(classes, activation=last),
        ]
    )
    if classes == 1:
        metrics = ["accuracy", keras.metrics.AUC(num_thresholds=20_000)]
        model.compile("adam", "binary_crossentropy", metrics=metrics)
    else:
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def accuracy(model: Any, kind: str) -> float:
    x, y = digits()
    told = model.predict(x, batch_size=512, verbose=0)
    found = told[:, 0] > 0.5 if kind == "large-metrics" else told.argmax(1)
    return float(np.mean(found == (y >= 5 if kind == "large-metrics" else y)))


def fit(
    kind: str, mode: str, frame: Any, fault: Fault | None, options: dict[str, Any],
    epochs: int = EPOCHS,
) -> Any:  # fmt: skip
    """One fit with the fault in it; returns the SparkModel."""
    from sparkdl import Limits, Network, SparkModel

    several = mode != "allreduce" and ("-shard" in kind or kind.endswith(TABLES))
    network = Network(num_servers=2) if several else Network()
    limits = Limits(memory_budget_mb=1) if kind == "full-spill" else Limits()
    if fault_counts.counts(kind):
        spark_model = fault_counts.make_spark_model(kind, mode)
    elif kind == "kill-worker-defaults":
        spark_model = SparkModel(make_model(kind), mode)
    else:
        spark_model = SparkModel(
            make_model(kind), mode, num_workers=2, batch_size=16, limits=limits, network=network
        )
    callbacks = [] if fault is None else [fault.callback()]
    spark_model.fit(frame, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return spark_model


def two_fits(mode: str, frame: Any) -> list[Any]:
    """Two fits at the same time, each with as many workers as there are slots."""
    done: list[Any] = []

    def one() -> None:
        try:
            done.append(fit("two-fits", mode, frame, None, {}))
        except Exception as error:
            done.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failed in done:
        if isinstance(failed, Exception):
            raise failed
    return done


def damage_newest(folder: Path) -> int:
    """Cuts the newest checkpoint in half; returns the epochs of the one before."""
    told = json.loads((folder / "checkpoint.json").read_text())
    newest = folder / told["file"]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    return int(told["previous"].removeprefix("epoch-").removesuffix(".keras"))


# -- the report -----------------------------------------------------------------------------------


def left_in_driver(spark: Any) -> list[str]:
    """Threads, processes and jobs of the fit that are still there after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        left = [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("sparkdl")]
        left += [f"process {p.pid}: server" for p in servers()]
        left += [f"process {p.pid}: child" for p in _below("sparkdl.launch.child")]
        if not is_stopped(spark):
            jobs = spark.sparkContext.statusTracker().getActiveJobsIds()
            left += [f"job {job}" for job in jobs]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def is_stopped(spark: Any) -> bool:
    """Whether the session was stopped, or its JVM is dead."""
    return spark.sparkContext._jsc is None or not _below("org.apache.spark.deploy.SparkSubmit")


@contextlib.contextmanager
def reported(report: dict[str, Any]) -> Iterator[None]:
    """Notes what became of the body: a model, or an error."""
    try:
        yield
        report["outcome"] = "model"
    except BaseException as error:
        report["outcome"] = "error"
        report["error"] = f"{type(error).__name__}: {error}"[:4000]
        report["interrupted"] = isinstance(error, KeyboardInterrupt)


def run(spark: Any, cell: str, folder: Path, resume: bool) -> dict[str, Any]:
    """One cell; what became of it."""
    kind, moment, mode = cell.split("/")
    report: dict[str, Any] = {}
    frame = make_frame(spark, kind, mode)
    fault = None if resume else Fault(kind, moment, spark)
    options: dict[str, Any] = {}
    if "-shard" in kind or kind.endswith(TABLES):
        options = {"checkpoint_dir": str(folder / f"checkpoints-{kind}-{moment}-{mode}")}
    if kind in ("kill-driver", "truncated-checkpoints", "full-checkpoint", "count-checkpoint"):
        place = "small" if kind == "full-checkpoint" else f"checkpoints-{mode}"
        options = {"checkpoint_dir": str(folder / place), "resume": resume}
    if kind == "truncated-checkpoints":
        fit(kind, mode, frame, None, options)
        report["expected_epochs"] = EPOCHS - damage_newest(folder / place)
        options["resume"] = True
    if kind in WARM:
        fit("", mode, make_frame(spark, "", mode), None, {}, epochs=1)
    models: list[Any] = []
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told, reported(report):
        warnings.simplefilter("always")
        if fault is not None:
            fault.at_start()
        if kind == "two-fits":
            models = two_fits(mode, frame)
        else:
            models = [fit(kind, mode, frame, fault, options)]
    ended = time.monotonic()
    alive(f"the fit has ended: {report}")
    if fault is not None:
        fault.wait()
    since = began if fault is None or fault.at is None else fault.at
    report["seconds"] = round(ended - since, 2)
    report["fired"] = moment == "any" or (fault is not None and fault.at is not None)
    report["warnings"] = [str(w.message)[:300] for w in told if w.category is RuntimeWarning]
    if models and fault_counts.counts(kind):
        report["counts"] = fault_counts.found(models[0].model, EPOCHS)
    elif models:
        report["accuracy"] = min(accuracy(m.model, kind) for m in models)
    report["epochs"] = [len(m.history.history["loss"]) for m in models]
    report["left"] = left_in_driver(spark)
    if kind in SMALL:  # nobody else sees that file system
        report["left"] += [f"file {p}" for p in (folder / "small").rglob("*sparkdl-*")]
    if kind == "full-checkpoint":
        report["restored_epoch"] = restored_epoch(folder / "small")
    return report


def run_all(cells: list[str], folder: Path, resume: bool) -> None:
    """The cells one after the other in one session, and a fit without a fault after the last."""
    spark = start_spark(
        folder / "small" if cells[0].startswith("full-spill/") else None,
        3 if cells[0].startswith("count-third/") else 2,
    )
    alive("Spark is up")
    reports: dict[str, Any] = {}
    for cell in cells:
        alive(cell)
        reports[cell] = run(spark, cell, folder, resume)
        if cell == cells[-1] and not is_stopped(spark):
            after: dict[str, Any] = {}
            with reported(after):
                mode = cell.rsplit("/", 1)[-1]
                fit("", mode, make_frame(spark, "", mode), None, {}, epochs=1)
            reports[cell]["afterwards"] = after.get("error", after["outcome"])
        (folder / "report.json").write_text(json.dumps(reports, indent=1))
    if not is_stopped(spark):
        spark.stop()


def restored_epoch(folder: Path) -> int:
    """Epochs of the checkpoint that is there to go on from."""
    from sparkdl.files.checkpoints import Checkpoints

    kept = Checkpoints(str(folder)).restore()
    return 0 if kept is None else kept.state.epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cells", nargs="+", help="kind/moment/mode")
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    alive("begins")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    sys.path.insert(0, str(ROOT))
    run_all(asked.cells, asked.folder, asked.resume)


if __name__ == "__main__":
    main()
