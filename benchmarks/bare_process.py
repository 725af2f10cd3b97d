"""One bare process: sparkdl's own compiled step and batches, without Spark and without exchange.

training.py starts as many as there are workers. Each waits for a line on its standard input before
it trains, so that all train at the same time, and prints the seconds.
"""

from __future__ import annotations

import sys
import time

import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

import workload  # noqa: E402

from sparkdl.data import Batches, rows_from_numpy  # noqa: E402
from sparkdl.learner import make_learner  # noqa: E402


def main() -> None:
    rank, workers, window = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    x, y = workload.make_data()
    rows = rows_from_numpy(x[rank::workers].copy(), y[rank::workers].copy())
    learner = make_learner(workload.make_model())
    batches = Batches(rows, workload.BATCH, rank=rank)
    for w in batches.stacks(0, window):
        learner.train(w)
    print("ready", flush=True)
    while sys.stdin.readline():
        started = time.perf_counter()
        for epoch in range(workload.EPOCHS):
            learner.reset_metrics()
            for w in batches.stacks(epoch, window):
                learner.train(w)
        seconds = time.perf_counter() - started
        print(seconds, flush=True)


main()
