"""A model of 25 million parameters: does a step cost more than computing and all-reduce?

Two processes, without Spark, do three things alternately: steps without any exchange (both at the
same time), an all-reduce of as many bytes as the gradient has, and steps with the exchange in them.
The time of the last is compared with the sum of the first two.

    python benchmarks/large_model.py [--ranks 2] [--rounds 7] [--optimizer momentum]
"""

from __future__ import annotations

import argparse
import multiprocessing.connection
import os
import statistics
import time
from typing import Any

import numpy as np
from all_reduce import Contender, has_horovod, join_ranks

BATCH = 64
STEPS = 4


def make_learner(optimizer: str) -> Any:
    """25 million parameters in four layers, the widest of which has 16.8 million."""
    import keras

    from sparkdl.learner import make_learner as learner_of

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(n, activation="relu") for n in (4096, 4096, 1024)]
    model = keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made = {
        "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(1e-4),
    }[optimizer]()
    model.compile(made, loss)
    return learner_of(model)


def be_rank(
    pipe: multiprocessing.connection.Connection,
    name: str,
    rank: int,
    optimizer: str,
    threads: int,
) -> None:
    """One rank; answers ``compute``, ``all-reduce`` and ``both`` with seconds per step."""
    from sparkdl.collective.communicator import Member, make_communicator
    from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner.framework import bound_tensorflow

    bound_tensorflow(threads)
    learner = make_learner(optimizer)
    rng = np.random.default_rng(rank)
    rows = rows_from_numpy(
        rng.normal(size=(BATCH * STEPS, 1024)).astype("float32"),
        rng.integers(0, 10, BATCH * STEPS),
    )
    window = next(iter(Batches(rows, BATCH, rank=rank).stacks(0, STEPS)))
    connector = make_communicator(name, rank=rank)
    pipe.send(connector.prepare().to_json())
    texts, token = pipe.recv()
    with connector.connect([Member.from_json(t) for t in texts], token) as communicator:
        synchronizer = AllReduceGradientSynchronizer(communicator, learner.layout)
        synchronizer.start(learner, scale=float(BATCH))
        gradient = np.zeros(learner.layout.size, np.float32)
        all_reduce = reducer(communicator, gradient)
        actions = {
            "compute": lambda: learner.train(window),
            "all-reduce": lambda: [all_reduce() for _ in range(STEPS)],
            "both": lambda: synchronizer.train(learner, window),
        }
        for action in actions.values():
            action()  # traces, and warms up
        while (order := pipe.recv()) is not None:
            communicator.barrier()
            start = time.perf_counter()
            actions[order]()
            communicator.barrier()
            pipe.send((time.perf_counter() - start) / STEPS)


def reducer(communicator: Any, array: np.ndarray) -> Any:
    """As in all_reduce.py: Horovod on a TensorFlow tensor, the built-in one in place."""
    if communicator.name != "horovod":
        return lambda: communicator.all_reduce(array, out=array)
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tensor = tf.constant(array)
    return lambda: hvd.allreduce(tensor, op=hvd.Sum, name="bench.large")


def measure(contender: Contender, order: str) -> float:
    """Seconds per step of the slowest rank."""
    for pipe in contender.pipes:
        pipe.send(order)
    return max(float(pipe.recv()) for pipe in contender.pipes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--optimizer", choices=["momentum", "adam"], default="momentum")
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // options.ranks)
    names = ["builtin"] + ["horovod"] * has_horovod()
    print(
        f"25 million parameters, batch {BATCH}, {options.optimizer}, {options.ranks} ranks of "
        f"{threads} threads; milliseconds per step, medians of {options.rounds}\n"
    )
    print("| communicator | compute | all-reduce | sum | step | sum / step |")
    print("|---|---|---|---|---|---|")
    for name in names:
        ranks = [(be_rank, (name, r, options.optimizer, threads)) for r in range(options.ranks)]
        contender = join_ranks(Contender(name, ranks))
        times: dict[str, list[float]] = {"compute": [], "all-reduce": [], "both": []}
        try:
            for _ in range(options.rounds):
                for order, found in times.items():
                    found.append(measure(contender, order))
        finally:
            contender.close()
        compute, reduce, both = (1e3 * statistics.median(t) for t in times.values())
        total = compute + reduce
        print(
            f"| {name} | {compute:.0f} | {reduce:.0f} | {total:.0f} | {both:.0f} "
            f"| {total / both:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
