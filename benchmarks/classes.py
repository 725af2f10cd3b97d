"""Classes spread over ranks: the time of a step, and the memory of a class, beside a ``Dense``.

Features of 128 numbers, a global batch of 256 rows, SGD with momentum. Each rank is a process with
one thread; ranks of one machine exchange through the built-in communicator. The times of contenders
alternate, medians are printed. Memory is what the largest resident size of a process grows by, for
each class: of a rank that has its part of the classes, and of plain Keras (TensorFlow) with a
``Dense`` of all classes and half of the rows.

    python benchmarks/classes.py [--classes 100000] [--rounds 5] [--memory]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from typing import Any

import numpy as np
import workload
from all_reduce import Contender, join_ranks

DIM, ROWS, STEPS = 128, 256, 3


def batch_of(rank: int, ranks: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    rows = ROWS // ranks
    return rng.normal(size=(rows, DIM)).astype(np.float32), rng.integers(0, classes, rows)


def be_rank(pipe: Any, rank: int, ranks: int, classes: int) -> None:
    """Connects, then takes steps when told to, and answers with the seconds of one."""
    from sparkdl.collective.communicator import Member, make_communicator
    from sparkdl.collective.table_exchange import TableExchange
    from sparkdl.tables.classes import ClassSpec, Margin
    from sparkdl.tables.service import TableSpec
    from sparkdl.tables.store import RowStore

    connector = make_communicator("builtin", rank=rank, host_id="here", advertised_host="127.0.0.1")
    pipe.send(connector.prepare().to_json())
    texts, token = pipe.recv()
    spec = ClassSpec(classes, Margin(m2=0.5))
    store = RowStore(DIM, "momentum", "normal", name="faces")
    features, labels = batch_of(rank, ranks, classes)
    upstream = np.full(len(labels), 1 / len(labels), np.float32)
    with connector.connect([Member.from_json(t) for t in texts], token) as communicator:
        exchange = TableExchange(communicator, [TableSpec("faces", store.settings, None, spec)])
        while pipe.recv():
            start = time.perf_counter()
            for _ in range(STEPS):
                exchange.begin_step(len(labels), 0.1)
                _, number = exchange.measure("faces", spec, features, labels, training=True)
                exchange.learn(number, upstream, trying=False)
                exchange.end_step(len(labels), 0.1)
            pipe.send((time.perf_counter() - start) / STEPS)
        pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def be_dense(pipe: Any, classes: int) -> None:
    """Plain Keras with half of the rows, as one of two data-parallel workers has."""
    import keras

    model = keras.Sequential([keras.Input((DIM,)), keras.layers.Dense(classes, use_bias=False)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    features, labels = batch_of(0, 2, classes)
    for _ in range(STEPS):
        model.train_on_batch(features, labels)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def ranks_with(ranks: int, classes: int) -> Contender:
    """Ranks that are connected."""
    return join_ranks(Contender("", [(be_rank, (rank, ranks, classes)) for rank in range(ranks)]))


def step(group: Contender) -> float:
    """Seconds of the slowest rank."""
    for pipe in group.pipes:
        pipe.send(True)
    return float(max(pipe.recv() for pipe in group.pipes))


def end(group: Contender) -> float:
    """Ends the ranks; returns the largest resident size of one, in bytes."""
    for pipe in group.pipes:
        pipe.send(False)
    most = max(pipe.recv() for pipe in group.pipes)
    for process in group.processes:
        process.join()
    return float(most)


def dense_memory(classes: int) -> float:
    alone = Contender("", [(be_dense, (classes,))])
    found = float(alone.pipes[0].recv())
    alone.processes[0].join()
    return found


def spread_memory(ranks: int, classes: int) -> float:
    group = ranks_with(ranks, classes)
    for _ in range(2):
        step(group)
    return end(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        os.environ[name] = "1"  # of the processes that are started
    few, many = options.classes, 3 * options.classes
    if options.memory:
        kinds = {
            "Dense, plain Keras": dense_memory,
            "1 rank": lambda classes: spread_memory(1, classes),
            "2 ranks": lambda classes: spread_memory(2, classes),
        }
        grown = {name: (of(many) - of(few)) / (many - few) for name, of in kinds.items()}
        dense = grown["Dense, plain Keras"]
        lines = [[n, f"{g:,.0f}", f"{dense / g:.2f}"] for n, g in grown.items()]
        print(workload.table(["a process of", "bytes of a class", "classes at one limit"], lines))
        return
    contenders = {
        "1 rank": ranks_with(1, few),
        "2 ranks": ranks_with(2, few),
        "1 rank, half of the classes": ranks_with(1, few // 2),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):
        for name, group in contenders.items():
            seconds = step(group)
            if number:
                times[name].append(seconds)
    for group in contenders.values():
        end(group)
    told = {name: statistics.median(found) for name, found in times.items()}
    lines = [
        [name, f"{1000 * s:.1f}", f"{ROWS / s:,.0f}", f"{told['1 rank'] / s:.2f}"]
        for name, s in told.items()
    ]
    print(workload.table(["classes on", "ms per step", "rows/s", "beside 1 rank"], lines))


if __name__ == "__main__":
    main()
