"""Hyper-parameter search: ASHA beside random search, trials side by side, and Optuna's own loop.

``python benchmarks/tune.py`` prints three tables:

1. 64 trials on digits, five seeds: ASHA and random search over the same trials. They are trained by
   scikit-learn's perceptron, an epoch at a time, so that 10,000 epochs take minutes; which trial
   trains how long does not depend on who trains it.
2. 8 trials of one slot on two executors: one after the other, and two at a time; and the same by
   ``keras.fit`` in one and in two processes without Spark, which is the machine's limit.
3. 32 trials by ``tune.search`` on two executors, and the same hyper-parameters by Optuna's
   ``study.optimize(n_jobs=2)`` in one process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from sparkdl import tune
from sparkdl.tune.journal import Journal
from sparkdl.tune.runner import Goal, OnEpoch, SearchRun, SegmentTraining

MAX_EPOCHS = 27
SEEDS = range(5)


def digits() -> tuple[Any, Any, Any, Any]:
    """1,437 digits to train on and 360 to compare by: x (n, 64) in [0, 1], y (n,)."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    return x[360:], y[360:], x[:360], y[:360]


class Perceptrons:
    """Trains trials by scikit-learn; keeps the network of each between its segments."""

    def __init__(self, data: tuple[Any, Any, Any, Any], seed: int) -> None:
        self._data, self._seed = data, seed
        self._networks: dict[int, MLPClassifier] = {}
        self.epochs = 0

    def prepare(
        self, trial: tune.Trial, segment: tune.Segment, on_epoch: OnEpoch
    ) -> SegmentTraining:
        """A network by the trial's hyper-parameters, or the one that it has."""
        made = MLPClassifier(
            hidden_layer_sizes=(trial.suggest_int("units", 8, 128, log=True),),
            learning_rate_init=trial.suggest_float("rate", 1e-4, 1e-1, log=True),
            alpha=trial.suggest_float("decay", 1e-6, 1e-1, log=True),
            activation=trial.suggest_categorical("activation", ["relu", "tanh", "logistic"]),
            batch_size=trial.suggest_categorical("batch", [16, 32, 64, 128]),
            random_state=self._seed + trial.number,
        )
        network = self._networks.setdefault(trial.number, made)
        x, y, held_x, held_y = self._data

        def train() -> dict[str, float]:
            for epoch in range(segment.begin, segment.end):
                order = np.random.default_rng((self._seed, trial.number, epoch)).permutation(len(x))
                network.partial_fit(x[order], y[order], classes=range(10))
                self.epochs += 1
            return {"val_accuracy": float(network.score(held_x, held_y))}

        return train

    def keep(self, trial: int, epochs: Collection[int]) -> None:
        """The network has the weights of its last epoch, whichever are needed."""

    def cancel(self) -> None:
        """Nothing runs beside the caller."""


def compare(
    searcher: tune.Searcher, data: tuple[Any, Any, Any, Any], seed: int
) -> tuple[float, int]:
    """The best accuracy of a search, and the epochs that it trained."""
    trainer = Perceptrons(data, seed)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.at(folder, {}, resume=False)
        goal = Goal("val_accuracy", True)
        SearchRun(
            searcher, trainer, journal, goal, seed=seed, max_concurrent=1, timeout_s=None,
            on_score=lambda trial, score: None,
        ).run()  # fmt: skip
    scores = [m["val_accuracy"] for r in journal.trials.values() for m in r.metrics.values()]
    return max(scores), trainer.epochs


def asha_and_random(trials: int) -> None:
    """ASHA with every rung, and with the lowest left out, beside random search's whole trials."""
    data = digits()
    whole = [compare(tune.RandomSearch(trials, MAX_EPOCHS), data, seed) for seed in SEEDS]
    for left_out in (0, 1):
        rungs = [rung.epochs for rung in _asha(trials, left_out).rungs]
        print(f"Rungs of {', '.join(map(str, rungs))} epochs:\n")
        print(
            f"| seed | random: best of {trials} | epochs | ASHA: best | epochs | points below "
            "| share |"
        )
        print("|---|---|---|---|---|---|---|")
        gaps, shares = [], []
        for seed, (best_of_all, all_epochs) in zip(SEEDS, whole, strict=True):
            best, epochs = compare(_asha(trials, left_out), data, seed)
            gaps.append(100 * (best_of_all - best))
            shares.append(epochs / all_epochs)
            print(
                f"| {seed} | {best_of_all:.4f} | {all_epochs} | {best:.4f} | {epochs} "
                f"| {gaps[-1]:.2f} | {shares[-1]:.2f} |",
                flush=True,
            )
        print(
            f"\nMean: {statistics.mean(gaps):.2f} points below random search's best with "
            f"{statistics.mean(shares):.0%} of its epochs.\n"
        )


def _asha(trials: int, left_out: int) -> tune.Asha:
    return tune.Asha(trials, MAX_EPOCHS, 3, min_early_stopping_rate=left_out)


def build(trial: Any) -> Any:
    """A network of two layers; ``trial`` is ours or Optuna's."""
    import keras

    units = trial.suggest_int("units", 16, 256, log=True)
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def searched(frame: Any, trials: int, epochs: int, at_once: int) -> tuple[float, list[Any]]:
    """Seconds of a random search, and its trials' hyper-parameters."""
    began = time.perf_counter()
    with tune.search(
        build, frame, metric="val_accuracy", validation_split=0.2, verbose=0,
        searcher=tune.RandomSearch(trials, epochs), max_concurrent=at_once,
    ) as study:  # fmt: skip
        return time.perf_counter() - began, [record.params for record in study.records]


def side_by_side(frame: Any, epochs: int) -> None:
    print("| 8 trials of one slot | seconds |\n|---|---|")
    alone, params = searched(frame, 8, epochs, 1)
    print(f"| one after the other | {alone:.1f} |")
    two, _ = searched(frame, 8, epochs, 2)
    print(f"| two at a time | {two:.1f} |", flush=True)
    bare = {processes: bare_keras(params, epochs, processes) for processes in (1, 2)}
    print(f"| `keras.fit`, one process | {bare[1]:.1f} |")
    print(f"| `keras.fit`, two processes | {bare[2]:.1f} |\n")
    print(
        f"Ratio: {two / alone:.2f}; of the bare processes: {bare[2] / bare[1]:.2f}.\n", flush=True
    )


def bare_keras(params: list[Any], epochs: int, processes: int) -> float:
    """Seconds of the trials by ``keras.fit``, dealt to processes without Spark."""
    workers = multiprocessing.get_context("spawn").Pool(processes)
    with workers:
        workers.map(_trained, [(params[0], 1)] * processes, chunksize=1)  # they have the framework
        began = time.perf_counter()
        workers.map(_trained, [(given, epochs) for given in params], chunksize=1)
        return time.perf_counter() - began


def _trained(task: tuple[Any, int]) -> None:
    given, epochs = task
    x, y, _, _ = digits()
    model = build(tune.Trial(0, 0, given))
    model.fit(x, y, epochs=epochs, validation_split=0.2, verbose=0)


def beside_optuna(frame: Any, x: Any, y: Any, trials: int, epochs: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ours, params = searched(frame, trials, epochs, 2)
    study = optuna.create_study(direction="maximize")
    for given in params:
        study.enqueue_trial(given)

    def objective(trial: Any) -> float:
        history = build(trial).fit(x, y, epochs=epochs, validation_split=0.2, verbose=0)
        return float(history.history["val_accuracy"][-1])

    began = time.perf_counter()
    study.optimize(objective, n_trials=trials, n_jobs=2)
    theirs = time.perf_counter() - began
    print(f"| {trials} trials of {epochs} epochs | seconds |\n|---|---|")
    print(f"| `tune.search`, two executors | {ours:.1f} |")
    print(f"| `study.optimize(n_jobs=2)` | {theirs:.1f} |\n\nRatio: {theirs / ours:.2f}.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["all", "asha", "side", "optuna"], default="all")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    if given.part in ("all", "asha"):
        asha_and_random(given.trials)
    if given.part == "asha":
        return
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.ui.enabled", "false").getOrCreate()
    )  # fmt: skip
    x, y, _, _ = digits()
    rows = [(row.tolist(), int(label)) for row, label in zip(x, y, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label int").repartition(2).cache()
    searched(frame, 2, 1, 2)  # both executors have their framework
    if given.part in ("all", "side"):
        side_by_side(frame, given.epochs)
    if given.part in ("all", "optuna"):
        beside_optuna(frame, x, y, 32, given.epochs)
    spark.stop()


if __name__ == "__main__":
    main()
