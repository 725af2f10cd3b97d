"""Asynchronous training at low and high learning rates: the last epoch's mean loss, five seeds.

    python benchmarks/high_rates.py [--problems NAME ...] [--workers 2 8] [--seeds 5] [--real]
                                    [--rows 60000] [--epochs 3] [--window 1] [--bound]

Each problem is trained by one process and by asynchronous workers with the automatic window, with
and without the damping of ``sparkdl.rules.damping``. The figure is the mean loss of the last epoch
over that of one process with the same seed (of data, weights and row order): mean over the seeds
and, in parentheses, the lowest and the highest. The loss at the end says little at high rates: for
one process alone it differs by a factor of two between seeds.

"Counted" is the mean part of the workers' changes that the damping let through
(``spark_model.summary.counted``).

Without ``--real`` the workers are simulated (``support/simulated_training``: exact, one
core, no Keras). With it Keras trains, by threads over a real server (``support/worker_threads``).

With ``--bound`` a last column says what one process reaches on the batch of all workers together
(``batch · p``) at the best of four learning rates, chosen with hindsight, without any exchange.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(__file__))
import numpy as np
import workload
from support.simulated_training import Training

from sparkdl.worker import auto_window

FACTORS = (0.5, 1.0, 1.41, 2.0)
"""Learning rates of the last column, times the problem's, with two workers; with p: times p / 2."""


def linear(draw: Callable[[np.random.Generator, int], np.ndarray]) -> Callable[..., Any]:
    """Rows by ``draw``; classes of a linear teacher without noise."""

    def make(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        x = draw(rng, rows).astype(np.float32)
        return x, (x @ rng.standard_normal((784, 10)).astype(np.float32)).argmax(1)

    return make


UNIFORM = linear(lambda rng, rows: rng.random((rows, 784), np.float32))
CENTERED = linear(lambda rng, rows: rng.random((rows, 784), np.float32) - np.float32(0.5))
NORMAL = linear(lambda rng, rows: rng.standard_normal((rows, 784), np.float32))


@dataclass(frozen=True)
class Problem:
    """Rows and classes, an optimizer and its learning rate."""

    make: Callable[..., Any]
    optimizer: str
    rate: float


PROBLEMS = {
    "noisy teacher, SGD 0.01": Problem(workload.make_data, "sgd", 0.01),
    "noisy teacher, SGD 0.1": Problem(workload.make_data, "sgd", 0.1),
    "noisy teacher, Adam 0.001": Problem(workload.make_data, "adam", 1e-3),
    "centered, SGD 0.1": Problem(CENTERED, "sgd", 0.1),
    "centered, SGD 0.5": Problem(CENTERED, "sgd", 0.5),
    "normal, SGD 0.1": Problem(NORMAL, "sgd", 0.1),
    "normal, Adam 0.001": Problem(NORMAL, "adam", 1e-3),
    "normal, Adam 0.01": Problem(NORMAL, "adam", 1e-2),
    "not centered, SGD 0.01": Problem(UNIFORM, "sgd", 0.01),
    "not centered, SGD 0.1": Problem(UNIFORM, "sgd", 0.1),
    "not centered, Adam 0.001": Problem(UNIFORM, "adam", 1e-3),
}


class Simulated:
    """Runs of ``support/simulated_training``."""

    def __init__(self, problem: Problem, rows: int, epochs: int, seed: int) -> None:
        x, y = problem.make(rows, seed)
        self._job = Training(
            x, np.asarray(y, np.int64), problem.optimizer, problem.rate, epochs, seed
        )

    def alone(self) -> float:
        return self._job.alone()[-1]

    def workers(self, count: int, window: int, damping: bool) -> tuple[float, float]:
        losses, counted = self._job.asynchronous(count, window, damping=damping)
        return losses[-1], counted

    def together(self, count: int) -> float:
        """One process on the batch of all workers, at the best rate."""
        job = replace(self._job, batch=self._job.batch * count)
        rates = [factor * job.rate * count / 2 for factor in FACTORS]
        return min(replace(job, rate=rate).alone()[-1] for rate in rates)


class Real:
    """The same runs with Keras, threads and a real server."""

    def __init__(self, problem: Problem, rows: int, epochs: int, seed: int) -> None:
        self._problem, self._epochs, self._seed = problem, epochs, seed
        x, y = problem.make(rows, seed)
        self._x, self._y = x, np.asarray(y, np.int32)

    def _model(self) -> Any:
        import keras

        kind = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[self._problem.optimizer]
        return workload.make_model(kind(self._problem.rate), self._seed + 1)

    def alone(self) -> float:
        model, batch = self._model(), workload.BATCH
        history = model.fit(
            self._x, self._y, batch_size=batch, epochs=self._epochs, verbose=0,
        )  # fmt: skip
        return float(history.history["loss"][-1])

    def workers(self, count: int, window: int, damping: bool) -> tuple[float, float]:
        from support import worker_threads

        from sparkdl.learner import make_learner
        from sparkdl.rules import Downpour

        outcome = worker_threads.run_with_server(
            [make_learner(self._model()) for _ in range(count)],
            [(self._x[rank::count], self._y[rank::count]) for rank in range(count)],
            Downpour(damping=damping), epochs=self._epochs, batch_size=workload.BATCH,
            window=window, seed=self._seed,
        )  # fmt: skip
        return outcome.losses[-1], float("nan")  # the simulation says it

    def together(self, count: int) -> float:
        return float("nan")  # the simulation says it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=workload.ROWS)
    parser.add_argument("--epochs", type=int, default=workload.EPOCHS)
    parser.add_argument("--window", type=int, help="batches; default: the automatic window")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--bound", action="store_true")
    args = parser.parse_args()
    kind = Real if args.real else Simulated
    header = ["problem", "one process", "workers", "damped", "counted", "added up"]
    header += ["one process, batch · p"] * args.bound
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for name in args.problems:
        runs = [kind(PROBLEMS[name], args.rows, args.epochs, s) for s in range(args.seeds)]
        alone = np.array([run.alone() for run in runs])
        for count in args.workers:
            window = args.window or auto_window(args.rows // count // workload.BATCH, count)
            found = {
                damping: np.array([run.workers(count, window, damping) for run in runs])
                for damping in (True, False)
            }
            columns = [found[True][:, 0], found[False][:, 0]]
            if args.bound:
                columns.append(np.array([run.together(count) for run in runs]))
            shown = [spread(values / alone) for values in columns]
            shown.insert(1, f"{found[True][:, 1].mean():.2f}")
            line = [name, spread(alone), str(count), *shown]
            print("| " + " | ".join(line) + " |", flush=True)


def spread(values: np.ndarray) -> str:
    """Mean, and lowest and highest in parentheses."""
    return f"{values.mean():.3f} ({values.min():.3f}–{values.max():.3f})"


if __name__ == "__main__":
    main()
