"""Slow workers: speed and loss of rules that wait for them, and of rules that do not.

    python benchmarks/stragglers.py [--seconds 15] [--workers 4] [--seeds 5] [--quick]

MNIST with the small CNN. Computing is made slow by pauses (0.1 s a batch), so that the machine's
cores are no limit; learners, servers and all-reduce rules are the real ones, in threads. Two cases:
one worker is always five times as slow; every worker is five times as slow in one batch of ten, at
random.
All rules have the same time; rows per second and the test loss then are compared: means over the
seeds, of loss and accuracy with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(__file__))
import datasets
import numpy as np
import worker_threads
import workload
from rules import Bench

BATCH, SLOWER = 32, 5
CASES = {"one worker always": "one", "each worker now and then": "any"}


@dataclass(frozen=True)
class Contender:
    """A row of the table: a rule of the server, or of all-reduce, and its window."""

    label: str
    family: str
    rule: Any
    window: int = 1


def contenders() -> list[Contender]:
    from sparkdl.collective.rules import Mean, StragglerDrop
    from sparkdl.rules import BSP, SSP, Downpour, DynSGD

    return [
        Contender("BSP (server)", "server", BSP()),
        Contender("mean (all-reduce)", "allreduce", Mean()),
        Contender("straggler drop (all-reduce)", "allreduce", StragglerDrop()),
        Contender("SSP, 3 windows of 1", "server", SSP()),
        Contender("SSP, 3 windows of 5", "server", SSP(), 5),
        Contender("asynchronous, window of 1", "server", Downpour()),
        Contender("asynchronous, window of 5", "server", Downpour(), 5),
        Contender("asynchronous (dynsgd), window of 5", "server", DynSGD(), 5),
    ]


def pauses(case: str, workers: int, pause_s: float, seed: int) -> list[worker_threads.Pause]:
    """For each worker, how many seconds longer a batch takes."""

    def make(rank: int) -> worker_threads.Pause:
        if case == "one":
            seconds = pause_s * (SLOWER if rank == workers - 1 else 1)
            return lambda: seconds
        rng = np.random.default_rng([seed, rank])
        return lambda: pause_s * (SLOWER if rng.random() < 0.1 else 1)

    return [make(rank) for rank in range(workers)]


@dataclass(frozen=True)
class Result:
    """What a contender reached with one seed."""

    rows_per_s: float
    loss: float
    accuracy: float
    of_last: float


def run(
    bench: Bench, contender: Contender, case: str, args: argparse.Namespace, seed: int
) -> Result:
    """Trains with one seed of weights, row order and pauses."""
    import keras

    learners = bench.learners("adam", args.workers, seed)
    share = len(bench.x) // args.workers
    parts = [
        (bench.x[i * share :][:share], bench.y[i * share :][:share]) for i in range(args.workers)
    ]
    options: dict[str, Any] = {
        "epochs": 1000, "batch_size": BATCH, "window": contender.window,
        "pauses": pauses(case, args.workers, 0.01 if args.quick else 0.1, seed),
        "stop_after_s": args.seconds, "seed": seed,
    }  # fmt: skip
    if contender.family == "server":
        outcome = worker_threads.run_with_server(learners, parts, contender.rule, **options)
    else:
        config = keras.optimizers.serialize(learners[0].model.optimizer)
        outcome = worker_threads.run_with_all_reduce(
            learners, parts, contender.rule, config, **options
        )
    accuracy, loss = bench.judge(outcome.weights)
    by_slow = outcome.rows_by_worker[-1] / max(outcome.rows, 1)
    return Result(outcome.rows / outcome.seconds, loss, accuracy, by_slow)


def row_of(contender: Contender, results: list[Result]) -> list[str]:
    """A contender's row of the table."""
    rows_per_s = statistics.mean(r.rows_per_s for r in results)
    of_last = statistics.mean(r.of_last for r in results)
    return [
        contender.label, f"{rows_per_s:.0f}", spread([r.loss for r in results]),
        spread([r.accuracy for r in results]), f"{100 * of_last:.0f} %",
    ]  # fmt: skip


def spread(values: list[float]) -> str:
    """Mean, lowest and highest."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of contenders' names")
    parser.add_argument("--quick", action="store_true", help="two seconds each: does it run?")
    args = parser.parse_args()
    if datasets.folder() is None:
        print("The data are not here; set SPARKDL_DATA.")
        return
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    if args.quick:
        args.seconds, args.workers, args.seeds = 1.0, 2, 1
    bench = Bench("mnist")
    header = ["", "rows/s", "test loss", "test accuracy", "rows of the last worker"]
    for title, case in CASES.items():
        print(
            f"\n{title} {SLOWER} times as slow, {args.workers} workers, {args.seconds:g} s, "
            f"{args.seeds} seeds\n"
        )
        rows = []
        for contender in contenders():
            if not any(part in contender.label for part in args.only):
                continue
            results = [run(bench, contender, case, args, seed) for seed in range(args.seeds)]
            rows.append(row_of(contender, results))
            print("  ", *rows[-1], flush=True)
        print(workload.table(header, rows), flush=True)


if __name__ == "__main__":
    main()
