"""What asynchronous training learns with 2 to 32 workers: the automatic window and others.

    python benchmarks/many_workers.py [--rows 400000] [--optimizer adam|sgd] [--workers 2 8 32]
                                      [--seeds 5]

The network of ``workload`` and its noisy teacher, one epoch, 20,000 rows held out. Workers are
threads of this process with a real server and without Spark (see ``worker_threads``), so many
workers need no memory for processes. Prints a Markdown table; plain Keras trains the same epoch.
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
import rules
import workload

from sparkdl.config import AUTO_WINDOW
from sparkdl.rules import make_rule
from sparkdl.worker import auto_window

HELD_OUT = 20_000
ROWS = [
    ("downpour", AUTO_WINDOW),
    ("downpour", 1),
    ("downpour", 16),
    ("staleness_aware", 16),
    ("dynsgd", 16),
    ("geo", 16),
]


@dataclass(frozen=True)
class Case:
    """A case as ``rules.Case``, with a window and an optimizer of its own."""

    rule: str
    batches: int
    optimizer: str
    family: str = "server"

    def make(self) -> Any:
        """The rule."""
        return make_rule(self.rule)

    def batch(self, task: rules.Task, workers: int) -> int:
        """Keras' batch on every worker."""
        return task.batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    x, y = workload.make_data(args.rows + HELD_OUT)
    data = x[: args.rows], y[: args.rows], x[args.rows :], y[args.rows :]
    rules.TASKS["teacher"] = rules.Task(
        lambda: data, workload.make_model, "accuracy", args.rows, 1, workload.BATCH
    )
    bench = rules.Bench("teacher")
    plain = [bench.plain(args.optimizer, seed, 1) for seed in range(args.seeds)]
    print(
        f"Plain Keras, {args.optimizer}, {args.seeds} seeds: accuracy {spread(plain, 'metric')}, "
        f"loss {spread(plain, 'loss')}\n"
    )
    print("| workers | rule | window | accuracy (lowest to highest) | points from Keras | loss |")
    print("|---|---|---|---|---|---|")
    for workers in args.workers:
        for rule, window in ROWS:
            case = Case(rule, window, args.optimizer)
            lines = [bench.run(case, workers, seed, 1) for seed in range(args.seeds)]
            chosen = auto_window(args.rows // workers // workload.BATCH, workers)
            shown = f"automatic: {chosen}" if window == AUTO_WINDOW else str(window)
            points = 100 * (mean(lines, "metric") - mean(plain, "metric"))
            print(
                f"| {workers} | {rule} | {shown} | {spread(lines, 'metric')} | {points:+.1f} | "
                f"{spread(lines, 'loss')} |",
                flush=True,
            )


def mean(lines: list[dict[str, Any]], name: str) -> float:
    """The mean of a figure over the seeds."""
    return statistics.mean(line[name] for line in lines)


def spread(lines: list[dict[str, Any]], name: str) -> str:
    """The mean of a figure over the seeds, with the lowest and the highest."""
    found = [line[name] for line in lines]
    return f"{mean(lines, name):.4f} ({min(found):.4f} to {max(found):.4f})"


if __name__ == "__main__":
    main()
