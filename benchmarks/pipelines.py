"""What pipelines cost: validators side by side, files of a large model, a stream that is killed.

    python benchmarks/pipelines.py [--part validator files stream] [--repeats 3] [--gib 1]

``validator``: a CrossValidator of 2 folds and 2 maps whose fits take both slots (2 workers in mode
synchronous), one fit after the other and with ``parallelism=2``, alternately. ``files``: a
KerasTransformer with a model of so many GiB is saved and loaded; compared with copying the model's
``.keras`` file, to the page cache both, alternately; "peak memory" is what this process needed
beyond what it had before. ``stream``: 20 files are trained micro-batch by
micro-batch (``allreduce``), once whole and once in a process that is killed in the middle and
started again; compared with plain Keras' ``fit`` on the same rows in the same order.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
from workload import make_frame, median, start_spark, table

FILES, ROWS, WIDTH, EPOCHS = 20, 512, 20, 5


def make_rows(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, WIDTH)).astype("float32")
    return x, x[:, :4].argmax(1).astype("int32")


def build(units: int = 32) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def time_validators(repeats: int) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
    from pyspark.sql import functions as F

    from sparkdl.ml import KerasClassifier

    spark = start_spark(2)
    frame = make_frame(spark, *make_rows(0, 20_000), 2)
    frame = frame.withColumn("label", F.col("label").cast("double"))
    classifier = KerasClassifier(
        modelBuilder=build, mode="synchronous", numWorkers=2, epochs=10, batchSize=64
    )
    sizes = [{"units": 32}, {"units": 64}]
    grid = ParamGridBuilder().addGrid(classifier.builderArgs, sizes).build()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    metrics = []
    for turn in range(repeats + 1):
        for parallelism in seconds:
            validator = CrossValidator(
                estimator=classifier, estimatorParamMaps=grid, numFolds=2, seed=1,
                evaluator=MulticlassClassificationEvaluator(), parallelism=parallelism,
            )  # fmt: skip
            started = time.perf_counter()
            metrics.append(validator.fit(frame).avgMetrics)
            if turn:  # the first imports and traces
                seconds[parallelism].append(time.perf_counter() - started)
    one, two = median(seconds[1]), median(seconds[2])
    print(f"\nvalidator: 2 folds x 2 maps, synchronous, 2 workers, 2 slots ({repeats} times)\n")
    rows = [["1", f"{one:.2f}", "1.00"], ["2", f"{two:.2f}", f"{two / one:.2f}"]]
    print(table(["parallelism", "seconds", "x"], rows))
    print(f"\nlargest difference of a metric: {np.ptp(metrics, axis=0).max():.4f}", flush=True)
    spark.stop()


def memory(field: str) -> float:
    """MiB of this process, as Linux counts them."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[field].split()[0]) / 1024


def time_files(repeats: int, gib: float) -> None:
    import keras

    from sparkdl.ml import KerasTransformer

    spark = start_spark(1)
    side = int((gib * 2**30 / 4) ** 0.5)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((side,)), keras.layers.Dense(side)])
    transformer = KerasTransformer(model=model)
    size = len(transformer.trained.archive.content)
    folder = tempfile.mkdtemp(prefix="sparkdl-bench-")
    seconds: dict[str, list[float]] = {"copy": [], "save": [], "load": []}
    peaks: dict[str, list[float]] = {"copy": [], "save": [], "load": []}

    def timed(name: str, call: Any) -> Any:
        before = memory("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        started = time.perf_counter()
        result = call()
        seconds[name].append(time.perf_counter() - started)
        peaks[name].append(memory("VmHWM") - before)
        return result

    try:
        with open(f"{folder}/model.keras", "wb") as file:
            file.write(transformer.trained.archive.content)
        small = KerasTransformer(model=build())
        small.save(f"{folder}/warm")
        KerasTransformer.load(f"{folder}/warm")
        for _ in range(repeats):
            timed("copy", lambda: shutil.copyfile(f"{folder}/model.keras", f"{folder}/copy"))
            timed("save", lambda: transformer.write().overwrite().save(f"{folder}/saved"))
            loaded = timed("load", lambda: KerasTransformer.load(f"{folder}/saved"))
            assert loaded.trained.archive.content == transformer.trained.archive.content
            del loaded
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        spark.stop()
    copy = median(seconds["copy"])
    rows = [
        [name, f"{median(values):.2f}", f"{size / 2**20 / median(values):,.0f}",
         f"{median(values) / copy:.1f}", f"{median(peaks[name]):,.0f}"]
        for name, values in seconds.items()
    ]  # fmt: skip
    print(f"\nfiles: a model of {size / 2**20:,.0f} MiB\n")
    print(table(["what", "seconds", "MiB/s", "x copy", "peak memory, MiB"], rows), flush=True)


def train_stream(folder: str, name: str, kill_after: int) -> None:
    """Trains in this process; ends it by SIGKILL after so many micro-batches (0: never)."""
    from sparkdl import SparkModel

    spark = start_spark(2)
    reader = spark.readStream.schema("features array<float>, label int")
    stream = reader.option("maxFilesPerTrigger", 1).parquet(f"{folder}/in")
    model = SparkModel(build(), mode="allreduce", num_workers=2, batch_size=ROWS // 2)
    seen = []

    def note(batch_id: int, history: Any) -> None:
        seen.append(batch_id)
        if len(seen) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    training = model.fit_stream(
        stream, checkpoint_dir=f"{folder}/{name}", trigger={"availableNow": True}, on_batch=note,
        epochs_per_batch=EPOCHS,
    )  # fmt: skip
    assert training.await_termination(500)
    np.savez(f"{folder}/{name}.npz", *training.model.get_weights())
    print("TRAINED " + " ".join(map(str, seen)), flush=True)
    spark.stop()


def check_stream() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tempfile.mkdtemp(prefix="sparkdl-bench-")
    os.mkdir(f"{folder}/in")
    plain = build()
    for number in range(FILES):
        x, y = make_rows(number, ROWS)
        features = pa.array(x.tolist(), pa.list_(pa.float32()))
        path = f"{folder}/in/{number:02d}.parquet"
        pq.write_table(pa.table({"features": features, "label": pa.array(y)}), path)
        os.utime(path, (1_700_000_000 + number,) * 2)  # Spark takes files by their times
        plain.fit(x, y, batch_size=ROWS, epochs=EPOCHS, verbose=0)

    def run(name: str, kill_after: int) -> tuple[int, list[int]]:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--train", folder, name, str(kill_after)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("TRAINED")]
        if not lines and done.returncode != -signal.SIGKILL:
            raise RuntimeError(done.stderr[-3000:])
        return done.returncode, [int(n) for line in lines for n in line.split()[1:]]

    try:
        _, whole = run("whole", 0)
        code, _ = run("killed", FILES // 2)
        _, rest = run("killed", 0)
        found = {name: _weights(f"{folder}/{name}.npz") for name in ("whole", "killed")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [
        [name, f"{max(np.abs(a - b).max() for a, b in zip(*pair, strict=True)):.1e}"]
        for name, pair in (
            ("whole stream and plain Keras", (found["whole"], plain.get_weights())),
            ("killed stream and plain Keras", (found["killed"], plain.get_weights())),
            ("killed stream and whole stream", (found["killed"], found["whole"])),
        )
    ]
    print(f"\nstream: {FILES} files of {ROWS} rows, {EPOCHS} epochs each, a step an epoch\n")
    print(table(["weights of", "largest difference"], rows))
    print(f"\nmicro-batches trained: whole {len(whole)}; killed (exit code {code}) after "
          f"{FILES // 2}, then {rest[0]} to {rest[-1]}", flush=True)  # fmt: skip


def _weights(path: str) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", nargs="+", default=["validator", "files", "stream"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--train", nargs=3, default=None)
    given = parser.parse_args()
    if given.train:
        train_stream(given.train[0], given.train[1], int(given.train[2]))
        return
    if "validator" in given.part:
        time_validators(given.repeats)
    if "files" in given.part:
        time_files(given.repeats, given.gib)
    if "stream" in given.part:
        check_stream()


if __name__ == "__main__":
    main()
