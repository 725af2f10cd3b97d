"""``FTRLClassifier`` beside Vowpal Wabbit on one core, and beside Spark's own classifiers.

    python benchmarks/ftrl.py [--part core spark] [--repeats 5] [--quick]

``core``: a rank's work on one core (Arrow's columns -> rows in memory -> their order -> training)
beside ``vw --ftrl`` on the same core, which reads text, as it does for its users; both take the
rows of a9a, and generated ones with a million features, alternately. alpha 0.1, beta 1, no
regularization. Vowpal Wabbit has an environment of its own (``.venv-vw``), made once.

``spark``: seconds of ``fit`` to the best AUC of Spark's LogisticRegression, less 0.001: each
estimator with the best of two or three strengths of its L2 (``regParam``, ``lambda2``) and the
fewest iterations that get there, alternately, in one session with two slots. LogisticRegression
has ``standardization=False``, with which it is faster and better on sparse rows.

Medians are printed; log loss and AUC are those of rows that no one trained on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
import workload
from workload import median, table

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".venv-vw"
PACKAGES = ("vowpalwabbit==9.11.9",)
FEATURES, ENTRIES = 1_000_000, 40

Rows = tuple[list[np.ndarray], np.ndarray]
"""The indices of each row, all with the value 1, and the labels 0 and 1."""
Maker = Callable[[int, float], Any]
"""An estimator of so many iterations with a strength of regularization."""


def install() -> str:
    """The Python of the peer's environment."""
    python = str(PEER / "bin" / "python")
    if not PEER.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def a9a() -> tuple[Rows, Rows, int]:
    """26,000 rows to train on and the others, in a random order; 123 features."""
    where = workload.folder()
    assert where is not None
    with gzip.open(where / "a9a.libsvm.gz", "rt") as file:
        lines = [line.split() for line in file]
    order = np.random.default_rng(0).permutation(len(lines))
    rows = [np.array([int(e.split(":")[0]) - 1 for e in lines[at][1:]]) for at in order]
    labels = np.array([float(lines[at][0]) > 0 for at in order], float)
    return (rows[:26_000], labels[:26_000]), (rows[26_000:], labels[26_000:]), 123


def generated(count: int) -> tuple[Rows, Rows, int]:
    """Rows of 40 of a million features by Zipf's law, with a planted weight for each."""
    rng = np.random.default_rng(1)
    ranks = (rng.zipf(1.2, (count, ENTRIES)) - 1) % FEATURES
    names = rng.permutation(FEATURES)  # what is frequent may have any index
    indices = np.sort(names[ranks], axis=1)
    logits = rng.normal(0, 0.5, FEATURES)[indices].sum(1)
    labels = (rng.random(count) < 1 / (1 + np.exp(-(logits - logits.mean())))).astype(float)
    rows = [np.unique(row) for row in indices]
    cut = count * 9 // 10
    return (rows[:cut], labels[:cut]), (rows[cut:], labels[cut:]), FEATURES


def loss_and_auc(labels: np.ndarray, probability: np.ndarray) -> tuple[float, float]:
    from sklearn.metrics import roc_auc_score

    p = np.clip(probability, 1e-7, 1 - 1e-7)
    loss = -np.where(labels == 1, np.log(p), np.log1p(-p)).mean()
    return float(loss), float(roc_auc_score(labels, probability))


# -- one core --------------------------------------------------------------------------------------


def vectors_of(rows: Rows, size: int) -> Any:
    """The column as Spark gives it to a rank."""
    import pyarrow as pa

    lists = pa.array(rows[0], pa.list_(pa.int32()))
    ones = pa.array([np.ones(len(row)) for row in rows[0]], pa.list_(pa.float64()))
    kinds, sizes = np.zeros(len(lists), np.int8), np.full(len(lists), size, np.int32)
    fields = [pa.array(kinds), pa.array(sizes), lists, ones]
    return pa.StructArray.from_arrays(fields, names=["type", "size", "indices", "values"])


def text_of(rows: Rows) -> str:
    lines = (
        f"{1 if label else -1} | {' '.join(map(str, row))}"
        for row, label in zip(*rows, strict=True)
    )
    return "\n".join(lines) + "\n"


def train_here(column: Any, labels: np.ndarray, batch: int, epochs: int) -> tuple[float, Any]:
    import pyarrow as pa

    from sparkdl.collective.current import SoloCommunicator
    from sparkdl.linear.rank_task import LinearSettings, LinearTraining
    from sparkdl.linear.sparse_rows import SparseRows

    settings = LinearSettings(batch_size=batch, epochs=epochs)
    start = time.perf_counter()
    rows = SparseRows.from_arrow(column, pa.array(labels), None).ordered(0)
    part = LinearTraining(SoloCommunicator(), rows, settings).train()
    return time.perf_counter() - start, part


def compare_core(repeats: int, count: int) -> None:
    from sparkdl.linear.rank_task import LinearModel, probabilities
    from sparkdl.linear.sparse_rows import SparseVectors

    core = min(os.sched_getaffinity(0))
    script = str(ROOT / "benchmarks" / "support" / "peer_vw.py")
    peer = subprocess.Popen(
        ["taskset", "-c", str(core), install(), script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert peer.stdin is not None
    assert peer.stdout is not None
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    for name, (train, test, size), batches in (
        ("a9a", a9a(), (100, 1000, 10_000)),
        (f"generated, {count:,} rows, 1e6 features", generated(count), (1000, 10_000)),
    ):
        column, held = vectors_of(train, size), SparseVectors.from_arrow(vectors_of(test, size))
        kinds = [("vw --ftrl", 0), *((f"FTRLClassifier, batchSize={b}", b) for b in batches)]
        lines = []
        with tempfile.TemporaryDirectory() as folder:
            for part, rows in (("train", train), ("test", test)):
                Path(folder, part).write_text(text_of(rows))
            for epochs in (1, 5):
                told = {"train": f"{folder}/train", "test": f"{folder}/test", "passes": epochs,
                        "folder": folder}  # fmt: skip
                seconds: dict[str, list[float]] = {kind: [] for kind, _ in kinds}
                scores = {}
                for repeat in range(repeats + 1):
                    for kind, batch in kinds:
                        if batch:
                            took, part_ = train_here(column, train[1], batch, epochs)
                            model = LinearModel(size, part_.ids, part_.weights, part_.intercept)
                            found = probabilities(model.margins(held))
                        else:
                            peer.stdin.write(json.dumps(told) + "\n")
                            peer.stdin.flush()
                            answer = json.loads(peer.stdout.readline())
                            took, found = answer["seconds"], np.loadtxt(answer["predictions"])
                        scores[kind] = loss_and_auc(test[1], found)
                        if repeat:  # the first warms up
                            seconds[kind].append(took)
                for kind, _ in kinds:
                    rate = len(train[1]) * epochs / median(seconds[kind])
                    loss, auc = scores[kind]
                    lines.append([kind, str(epochs), f"{rate:,.0f}", f"{loss:.4f}", f"{auc:.4f}"])
        print(f"\n### {name}: one core\n")
        print(table(["", "epochs", "rows/s", "log loss", "AUC"], lines), flush=True)
    peer.stdin.close()
    peer.wait()
    os.sched_setaffinity(0, before)


# -- Spark -----------------------------------------------------------------------------------------


def start_spark() -> Any:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


def frame_of(spark: Any, rows: Rows, size: int, path: str) -> Any:
    """The rows as Spark reads them from a libsvm file, in memory."""
    with open(path, "w") as file:
        for row, label in zip(*rows, strict=True):
            file.write(f"{int(label)} {' '.join(f'{i + 1}:1' for i in row)}\n")
    frame = spark.read.format("libsvm").option("numFeatures", size).load(path)
    frame = frame.repartition(2).cache()
    frame.count()
    return frame


def compare_spark(repeats: int, count: int) -> None:
    from pyspark.ml.classification import FMClassifier, LogisticRegression
    from pyspark.ml.functions import vector_to_array

    from sparkdl.sparse import FTRLClassifier

    spark = start_spark()

    def judged(model: Any, frame: Any) -> tuple[float, float]:
        scored = model.transform(frame).select("label", vector_to_array("probability")[1])
        found = np.array(scored.collect())
        return loss_and_auc(found[:, 0], found[:, 1])

    def ftrl(n: int, strength: float) -> Any:
        return FTRLClassifier(batchSize=1000, maxIter=n, numWorkers=2, alpha=0.3, lambda2=strength)

    def logistic(n: int, strength: float) -> Any:
        return LogisticRegression(maxIter=n, regParam=strength, standardization=False)

    def machine(n: int, strength: float) -> Any:
        return FMClassifier(maxIter=n, factorSize=4, stepSize=0.1, seed=1, regParam=strength)

    for name, (train, test, size), with_machine in (
        ("a9a", a9a(), True),
        (f"generated, {count:,} rows, 1e6 features", generated(count), False),
    ):
        makers: dict[str, tuple[Maker, tuple[int, ...], tuple[float, ...]]] = {
            "LogisticRegression": (logistic, (5, 10, 20, 30, 50), (0.0, 1e-4, 1e-3)),
            "FTRLClassifier": (ftrl, (1, 2, 5, 10, 15, 20), (0.0, 20.0, 160.0)),
        }
        if with_machine:  # with a million features each of its iterations takes many seconds
            makers["FMClassifier, factorSize=4"] = (machine, (20, 50, 100), (0.0, 0.001))
        with tempfile.TemporaryDirectory() as folder:
            frames = [
                frame_of(spark, rows, size, f"{folder}/{at}.libsvm")
                for at, rows in enumerate((train, test))
            ]
            tries: dict[tuple[str, int, float], float] = {}

            def tried(kind: str, n: int, strength: float) -> float:
                if (kind, n, strength) not in tries:  # noqa: B023 - called at once
                    model = makers[kind][0](n, strength).fit(frames[0])  # noqa: B023
                    tries[kind, n, strength] = judged(model, frames[1])[1]  # noqa: B023
                return tries[kind, n, strength]  # noqa: B023

            chosen: dict[str, tuple[int, float]] = {}
            there: dict[str, bool] = {}
            target = 0.0
            for kind, (_, ladder, strengths) in makers.items():
                middle = ladder[len(ladder) // 2]
                strength = max(strengths, key=lambda s, k=kind, n=middle: tried(k, n, s))
                if not target:
                    target = max(tried(kind, n, strength) for n in ladder) - 0.001
                enough = (n for n in ladder if tried(kind, n, strength) >= target)
                best = next(enough, 0)
                there[kind] = best > 0
                best = best or max(ladder, key=lambda n, k=kind, s=strength: tried(k, n, s))
                chosen[kind] = best, strength
            seconds: dict[str, list[float]] = {kind: [] for kind in makers}
            scores = {}
            for _ in range(repeats):
                for kind, (make, _, _) in makers.items():
                    start = time.perf_counter()
                    model = make(*chosen[kind]).fit(frames[0])
                    seconds[kind].append(time.perf_counter() - start)
                    scores[kind] = judged(model, frames[1])
            for frame in frames:
                frame.unpersist()
        lines = [
            [kind, f"{chosen[kind][1]:g}", str(chosen[kind][0]) + ", not there" * (not there[kind]),
             f"{median(seconds[kind]):.2f}", f"{scores[kind][1]:.4f}", f"{scores[kind][0]:.4f}"]
            for kind in makers
        ]  # fmt: skip
        print(f"\n### {name}: seconds of fit to an AUC of {target:.4f}\n")
        head = ["", "regularization", "iterations", "seconds", "AUC", "log loss"]
        print(table(head, lines), flush=True)
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=["core", "spark"], choices=["core", "spark"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rows, once")
    options = parser.parse_args()
    repeats, count = (1, 5_000) if options.quick else (options.repeats, 200_000)
    if workload.folder() is None:
        print("The data are not here; set SPARKDL_DATA.")
        return
    if "core" in options.part:
        compare_core(repeats, count)
    if "spark" in options.part:
        compare_spark(max(1, repeats // 2 + 1), count)


if __name__ == "__main__":
    main()
