"""Training speed and loss: plain Keras, bare processes, and sparkdl in each mode; one run.

    python benchmarks/training.py [--repeats 5] [--workers 2]
                                  [--part loss server allreduce marginal]

All cases of a part are run alternately, medians are printed. "fit" is the wall time of the whole
call, Spark job, data transfer and all; "training" counts from the workers' first to last step.
The part "allreduce" is compared with Horovod without Spark (``horovodrun``); "marginal" tells
what each further epoch costs from what each fit costs: fits of 1 and of 13 epochs.

The part "loss" counts the seconds of a whole call until the loss on held-out rows is as low as
plain Keras has it after its epochs, on rows of the network above, MNIST and a9a. Each repeat is a
seed of its own. Rows to validate on are a frame; a callback ends the fit. Plain Keras is run as
users write it, and with the ``steps_per_execution`` of 1, 4, 16 and 64 that was fastest. The last
columns are of the same fits at a learning rate raised by the root of the number of workers, as is
usual for a larger global batch; seconds are infinite where the loss was not reached.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
import workload
from workload import BATCH, EPOCHS, ROWS, make_data, make_frame, make_model, median, start_spark


class Bare:
    """Two independent processes with the same compiled step."""

    def __init__(self, workers: int, window: int = 16) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "bare", str(rank), str(workers), str(window)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(workers)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdout.readline().strip() == "ready"

    def run(self) -> float:
        """Seconds until the last process has ended its steps, as they are counted for a fit."""
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait()


class ByHand:
    """Horovod without Spark: ``horovodrun`` and a script as in Horovod's documentation."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.program = os.path.join(os.path.dirname(sys.executable), "horovodrun")
        self.found = os.path.exists(self.program)

    def run(self) -> Run:
        done = subprocess.run(
            [self.program, "--gloo", "-np", str(self.workers), sys.executable, __file__, "by-hand"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        said = re.findall(r"RESULT (\S+) (\S+)", done.stdout)
        if len(said) != self.workers:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
        return Run(0.0, ROWS * EPOCHS / sum(float(speed) for speed, _ in said), 0.0)


@dataclass(frozen=True)
class Run:
    """Seconds of the whole call, of the training in it (0: not known); the last epoch's loss."""

    seconds: float
    training_s: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", nargs="*", default=list(PARTS))
    args = parser.parse_args()
    x, y = make_data()
    spark = start_spark(args.workers)
    try:
        frame = make_frame(spark, x, y, args.workers)
        for part in args.part:
            PARTS[part](Bench(frame, x, y, args.workers, args.repeats))
    finally:
        spark.stop()


@dataclass(frozen=True)
class Bench:
    """What is trained on, and how often."""

    frame: Any
    x: Any
    y: Any
    workers: int
    repeats: int

    def keras(self) -> Run:
        model = make_model()
        started = time.perf_counter()
        history = model.fit(self.x, self.y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        return Run(time.perf_counter() - started, 0.0, last_loss(history))

    def fit(self, mode: str, frequency: Any = "auto", **options: Any) -> Run:
        from sparkdl import SparkModel

        spark_model = SparkModel(
            make_model(), mode, frequency, num_workers=self.workers, batch_size=BATCH, **options
        )
        started = time.perf_counter()
        history = spark_model.fit(self.frame, epochs=EPOCHS, verbose=0)
        seconds = time.perf_counter() - started
        return Run(seconds, spark_model.summary.seconds, last_loss(history))

    def call(self, mode: str, epochs: int) -> float:
        """Seconds of a fit of so many epochs, with the mode's defaults."""
        from sparkdl import SparkModel

        spark_model = SparkModel(make_model(), mode, num_workers=self.workers, batch_size=BATCH)
        started = time.perf_counter()
        spark_model.fit(self.frame, epochs=epochs, verbose=0)
        return time.perf_counter() - started

    def alternate(self, cases: dict[str, Callable[[], Run]]) -> dict[str, list[Run]]:
        """Every case once to warm up, then all of them in turn."""
        make_model().fit(self.x[:BATCH], self.y[:BATCH], verbose=0)
        for case in cases.values():
            case()
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        for _ in range(self.repeats):
            for name, case in cases.items():
                runs[name].append(case())
                print(name, runs[name][-1], file=sys.stderr, flush=True)
        return runs


def last_loss(history: Any) -> float:
    """The mean loss of the last epoch while it trained: what a model has at one moment differs much
    more between runs."""
    return float(history.history["loss"][-1])


def print_table(runs: dict[str, list[Run]], yardstick: str, name: str) -> None:
    """A row per case; training speeds are compared with that of ``yardstick``."""
    speeds = {k: median([rate(r.seconds) for r in v]) for k, v in runs.items()}
    training = {k: median([rate(r.training_s) for r in v]) for k, v in runs.items()}
    losses = {k: median([r.loss for r in v]) for k, v in runs.items()}
    limit, base, base_loss = training.get(yardstick, 0.0), speeds[KERAS], losses[KERAS]
    rows = [
        [
            case,
            f"{speeds[case]:,.0f}" if speeds[case] else "",
            f"{(speeds[case] or training[case]) / base:.2f}",
            f"{training[case]:,.0f}" if training[case] else "",
            f"{training[case] / limit:.2f}" if training[case] and limit else "",
            f"{losses[case]:.3f}" if losses[case] else "",
            f"{losses[case] / base_loss:.3f}" if losses[case] else "",
        ]
        for case in runs
    ]
    header = ["", "fit rows/s", "× Keras", "training rows/s", f"× {name}", "loss", "× Keras' loss"]
    print("\n" + workload.table(header, rows), flush=True)


def rate(seconds: float) -> float:
    return ROWS * EPOCHS / seconds if seconds else 0.0


def run_server(bench: Bench) -> None:
    cold, warm = bench.fit("asynchronous"), bench.fit("asynchronous")
    print(f"first fit in a session: {cold.seconds:.2f} s, second: {warm.seconds:.2f} s", flush=True)
    bare = Bare(bench.workers)
    limit = f"{bench.workers} bare processes, same step"
    cases = {
        KERAS: bench.keras,
        "asynchronous, auto": lambda: bench.fit("asynchronous"),
        "asynchronous, batch": lambda: bench.fit("asynchronous", "batch"),
        "asynchronous, epoch": lambda: bench.fit("asynchronous", "epoch"),
        "hogwild, auto": lambda: bench.fit("hogwild"),
        "synchronous, batch (exact)": lambda: bench.fit("synchronous"),
        "synchronous, window 16": lambda: bench.fit("synchronous", 16),
        "asynchronous, auto, socket": lambda: bench.fit(
            "asynchronous", parameter_server_mode="socket"
        ),
        "asynchronous, auto, http": lambda: bench.fit("asynchronous", parameter_server_mode="http"),
        limit: lambda: Run(0.0, bare.run(), 0.0),
    }
    try:
        print_table(bench.alternate(cases), limit, "bare")
    finally:
        bare.close()


def run_allreduce(bench: Bench) -> None:
    by_hand = ByHand(bench.workers)
    cases: dict[str, Callable[[], Run]] = {
        KERAS: bench.keras,
        "allreduce, builtin": lambda: bench.fit("allreduce", communicator="builtin"),
    }
    yardstick = f"Horovod by hand, {bench.workers} processes"
    if by_hand.found:
        cases["allreduce, auto"] = lambda: bench.fit("allreduce", communicator="auto")
        cases["allreduce, horovod"] = lambda: bench.fit("allreduce", communicator="horovod")
        cases[yardstick] = by_hand.run
    else:
        print("Horovod is not installed (make horovod): its rows are left out")
    print_table(bench.alternate(cases), yardstick, "by hand")


def run_marginal(bench: Bench) -> None:
    modes, further = ("allreduce", "synchronous", "asynchronous"), 12
    bare = Bare(bench.workers)
    bare_s: list[float] = []
    calls: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    try:
        for mode in modes:
            bench.call(mode, 1)
        for _ in range(bench.repeats):
            bare_s.append(bare.run())
            for mode, taken in calls.items():
                taken.append((bench.call(mode, 1), bench.call(mode, 1 + further)))
                print(mode, taken[-1], file=sys.stderr, flush=True)
    finally:
        bare.close()
    limit = median([rate(s) for s in bare_s])
    rows = []
    for mode, taken in calls.items():
        epochs = [(long - short) / further for short, long in taken]
        marginal = median([ROWS / s for s in epochs])
        fixed = median([short - s for (short, _), s in zip(taken, epochs, strict=True)])
        rows.append([mode, f"{marginal:,.0f}", f"{marginal / limit:.2f}", f"{fixed:.2f}"])
    rows.append([f"{bench.workers} bare processes, same step", f"{limit:,.0f}", "1.00", ""])
    header = ["", "rows/s of a further epoch", "× bare", "s of a fit without its epochs"]
    print("\n" + workload.table(header, rows), flush=True)


@dataclass(frozen=True)
class Goal:
    """Rows, a model of a seed, and the epochs after which plain Keras has the loss to reach."""

    load: Callable[[], tuple[Any, Any, Any, Any]]
    make: Callable[[int], Any]
    epochs: int
    batch: int = 32


def made_rows() -> tuple[Any, Any, Any, Any]:
    """16,000 rows to train on and 4,000 that are held out."""
    x, y = make_data(20_000)
    return x[:16_000], y[:16_000], x[16_000:], y[16_000:]


GOALS = {
    "made, 16,000 rows": Goal(made_rows, lambda seed: make_model(seed=seed), 2),
    "MNIST, 8,000 rows": Goal(workload.mnist, workload.mnist_model, 8),
    "a9a, 26,000 rows": Goal(workload.a9a, workload.a9a_model, 4),
}
FASTER, WAYS = "with the best steps_per_execution", ("asynchronous", "allreduce")
RAISED = "learning rate × √workers"


def run_loss(bench: Bench) -> None:
    rows = []
    for name, goal in GOALS.items():
        if name[:4] != "made" and workload.folder() is None:
            print(f"{name}: the data are not here; set SPARKDL_DATA", file=sys.stderr)
            continue
        rows += reach(bench, name, goal)
    header = ["", "", "s", "epochs", "× Keras", "× Keras, faster"]
    header += [f"{RAISED}: s", "epochs", "× Keras, faster"]
    print("\n" + workload.table(header, rows), flush=True)


def reach(bench: Bench, name: str, goal: Goal) -> list[list[str]]:
    """Rows of the table: the median seconds, epochs and ratios of all seeds."""
    import keras

    from sparkdl import SparkModel

    x, y, x_held, y_held = goal.load()
    session = bench.frame.sparkSession
    frame = make_frame(session, x.reshape(len(x), -1), y, bench.workers)
    held = make_frame(session, x_held.reshape(len(x_held), -1), y_held, bench.workers)

    class Reached(keras.callbacks.Callback):
        def __init__(self, target: float) -> None:
            super().__init__()
            self.target = target

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if logs["val_loss"] <= self.target:
                self.model.stop_training = True

    def plain(seed: int, steps: int) -> tuple[float, list[float]]:
        model = goal.make(seed)
        model.steps_per_execution = steps
        begun = time.perf_counter()
        told = model.fit(
            x, y, batch_size=goal.batch, epochs=goal.epochs, verbose=0,
            validation_data=(x_held, y_held),
        )  # fmt: skip
        return time.perf_counter() - begun, told.history["val_loss"]

    def spread(mode: str, seed: int, target: float, raised: bool) -> tuple[float, list[float]]:
        model = goal.make(seed)
        if raised:
            model.optimizer.learning_rate.assign(model.optimizer.learning_rate * bench.workers**0.5)
        spark_model = SparkModel(
            model, mode, num_workers=bench.workers, batch_size=goal.batch, seed=seed
        )
        begun = time.perf_counter()
        told = spark_model.fit(
            frame, epochs=4 * goal.epochs, validation_data=held, verbose=0,
            callbacks=[Reached(target)],
        )  # fmt: skip
        return time.perf_counter() - begun, told.history["val_loss"]

    seconds = {steps: [plain(0, steps)[0] for _ in range(2)] for steps in (1, 4, 16, 64)}
    best = min(seconds, key=lambda steps: min(seconds[steps]))
    raised = [mode + RAISED for mode in WAYS]
    runs: dict[str, list[tuple[float, int]]] = {k: [] for k in (KERAS, FASTER, *WAYS, *raised)}
    for mode in WAYS:
        spread(mode, 0, 1e9, False)
    for seed in range(1, bench.repeats + 1):
        took, losses = plain(seed, 1)
        runs[KERAS].append((took, goal.epochs))
        runs[FASTER].append((plain(seed, best)[0], goal.epochs))
        for case in (*WAYS, *raised):
            mode = case.removesuffix(RAISED)
            took, found = spread(mode, seed, losses[-1], mode != case)
            if min(found) > losses[-1]:
                print(f"{name}, {case}: {min(found):.4f} is not {losses[-1]:.4f}", file=sys.stderr)
                took = float("inf")
            runs[case].append((took, len(found)))
        print(name, best, {k: v[-1] for k, v in runs.items()}, file=sys.stderr, flush=True)
    frame.unpersist()
    held.unpersist()

    def ratio(case: str, base: str) -> str:
        pairs = zip(runs[base], runs[case], strict=True)
        return f"{median([slow / fast for (slow, _), (fast, _) in pairs]):.2f}"

    def cells(case: str) -> list[str]:
        taken, epochs = zip(*runs[case], strict=True)
        return [f"{median(taken):.2f}", f"{median(epochs):.0f}"]

    return [
        [
            name, f"plain Keras, {case} ({best})" if case == FASTER else case, *cells(case),
            ratio(case, KERAS), ratio(case, FASTER),
            *([*cells(case + RAISED), ratio(case + RAISED, FASTER)] if case in WAYS else [""] * 3),
        ]
        for case in (KERAS, FASTER, *WAYS)
    ]  # fmt: skip


KERAS = "plain Keras fit, one process"
PARTS: dict[str, Callable[[Bench], None]] = {
    "loss": run_loss, "server": run_server, "allreduce": run_allreduce, "marginal": run_marginal
}  # fmt: skip


# -- the processes beside sparkdl ------------------------------------------------------------------


def one_thread() -> None:
    """Gives TensorFlow one thread in this process."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def be_bare() -> None:
    """sparkdl's own compiled step and batches, without Spark and without an exchange.

    Trains after each line on the standard input, so that all processes train at the same time, and
    prints the seconds.
    """
    one_thread()
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner

    rank, workers, window = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    x, y = make_data()
    rows = rows_from_numpy(x[rank::workers].copy(), y[rank::workers].copy())
    learner = make_learner(make_model())
    batches = Batches(rows, BATCH, rank=rank)
    for w in batches.stacks(0, window):
        learner.train(w)
    print("ready", flush=True)
    while sys.stdin.readline():
        started = time.perf_counter()
        for epoch in range(EPOCHS):
            learner.metrics.reset()
            for w in batches.stacks(epoch, window):
                learner.train(w)
        seconds = time.perf_counter() - started
        print(seconds, flush=True)


def be_by_hand() -> None:
    """The network with Horovod alone, as Horovod's documentation has it; ``horovodrun -np N``.

    A compiled step per batch with ``DistributedGradientTape``, fed by ``tf.data``. The first epoch
    is not counted (tracing, connecting). Each rank prints its rows per second and the trained
    model's loss on all rows.
    """
    one_thread()
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    all_x, all_y = make_data()
    x, y = all_x[hvd.rank() :: hvd.size()].copy(), all_y[hvd.rank() :: hvd.size()].copy()
    model = make_model()
    optimizer, loss_of = model.optimizer, tf.keras.losses.SparseCategoricalCrossentropy()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=hvd.rank())
    data = data.batch(BATCH, drop_remainder=True).prefetch(4)  # equal steps on all ranks

    variables = [v.value for v in model.trainable_variables]  # Horovod does not know Keras 3's own

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    weights = model.get_weights()
    for images, labels in data:
        step(images, labels)
    model.set_weights(weights)
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    hvd.allreduce(tf.zeros([]), name="together")
    started = time.perf_counter()
    for _ in range(EPOCHS):
        steps = [step(images, labels) for images, labels in data]
    seconds = time.perf_counter() - started
    rows = len(steps) * BATCH * EPOCHS
    loss = float(model.evaluate(all_x, all_y, batch_size=1024, verbose=0)[0])
    print(f"RESULT {rows / seconds} {loss}", flush=True)
    hvd.shutdown()


PROGRAMS = {"bare": be_bare, "by-hand": be_by_hand}

if __name__ == "__main__":
    PROGRAMS.get("".join(sys.argv[1:2]), main)()
