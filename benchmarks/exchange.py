"""What an exchange with the server costs in training: two processes, shared memory, no Spark.

    python benchmarks/exchange.py [--repeats 3] [--rows 20000] [--workers 2] [--transport shm]

The network of ``workload`` (0.47 MB), batch 64. The cases run in turn, in the same processes: bare
steps without any exchange, rounds of ``mode='synchronous'``, and windows of ``downpour``. "In the
exchange" is the time that a worker spends in each (the phase ``exchange`` of its clock; the wait
for the other worker included). "Longer than bare" is what a step (or a window) takes longer than
the bare steps in it: that adds what the server takes of the cores that train, a step in two halves,
and caches that hold something else afterwards. "Alone" are the same rounds in processes that do
nothing else. With ``on_nan='ignore'`` nobody looks whether updates are finite. "Processor" is what
a step takes of the cores, of a worker and (for each worker's step) of the server: with as many
cores as workers, the sum bounds the rate. It hardly depends on what else the machine does. Medians.
"""

from __future__ import annotations

import argparse
import base64
import os
import pickle
import secrets
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(__file__))
import workload

from sparkdl.collective.strategy import AllReduceStrategy, BarrierStrategy
from sparkdl.config import LoopSettings
from sparkdl.coordinator.driver_client import CoordinatorHost
from sparkdl.coordinator.settings import Settings
from sparkdl.ps.client import Progress, connect
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.rules import BSP, Downpour, Rule
from sparkdl.training.phases import PhaseClock, recording
from sparkdl.training.syncing import Strategy
from sparkdl.transport.address import ListenOptions
from sparkdl.weights import Layout

STACK = 16


@dataclass(frozen=True)
class Case:
    """A rule (None: no exchange) and the batches between two exchanges (0: nothing is trained)."""

    name: str
    rule: Rule | None
    window: int
    on_nan: str = "raise"
    all_reduce: bool = False

    def longer(self, step: float, bare: float) -> float | None:
        """Seconds that a window takes longer than its steps without any exchange."""
        return (step - bare) * self.window if self.rule is not None and self.window else None


CASES = [
    Case("bare", None, STACK),
    Case("synchronous, alone", BSP(), 0),
    Case("synchronous, every batch", BSP(), 1),
    Case("allreduce, every batch", None, 1, all_reduce=True),
    Case("asynchronous, every batch", Downpour(), 1),
    Case("asynchronous, every 4", Downpour(), 4),
    Case("asynchronous, every 16", Downpour(), STACK),
    Case("synchronous, every batch, on_nan='ignore'", BSP(), 1, "ignore"),
    Case("asynchronous, every 16, on_nan='ignore'", Downpour(), STACK, "ignore"),
]


@dataclass(frozen=True)
class Identity:
    """Which worker this is."""

    rank: int
    attempt: int = 0

    def all_gather(self, text: str) -> list[str]:
        raise NotImplementedError


def work(rank: int, rows: int) -> None:
    """A worker's process: a job per line of standard input.

    Of each it prints the seconds that it took, those of them that went into exchanges, and those
    of the processor.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner
    from sparkdl.worker import train

    x, y = workload.make_data(rows, seed=rank)
    batches = Batches(rows_from_numpy(x, y), workload.BATCH, rank=rank)
    learner = make_learner(workload.make_model())
    print("ready", flush=True)
    for line in sys.stdin:
        strategy, window = pickle.loads(base64.b64decode(line))
        used = time.process_time()
        if strategy is None:
            began = time.perf_counter()
            for stack in batches.stacks(0, window):
                learner.train(stack)
            seconds, within = time.perf_counter() - began, 0.0
        elif not window:
            seconds = exchange_alone(strategy, rank, learner.layout, -(-rows // workload.BATCH))
            within = seconds
        else:
            settings = LoopSettings(epochs=1, batch_size=workload.BATCH, window=window)
            with (
                recording(PhaseClock()) as clock,
                strategy.open(Identity(rank), learner.layout) as synchronizer,
            ):
                seconds = train(
                    learner, synchronizer, batches, settings, num_rows=rows, num_workers=2
                )
                within = clock.usage().seconds["exchange"]
        print(seconds, within, time.process_time() - used, flush=True)


def exchange_alone(strategy: ServerStrategy, rank: int, layout: Layout, rounds: int) -> float:
    """Seconds of so many rounds in which nobody trains; the first ten are not counted."""
    began = 0.0
    with connect(strategy.endpoint, "auto", rank=rank, layout=layout) as client:
        client.join(batches_per_epoch=rounds + 10)
        client.pull()
        for batch in range(rounds + 10):
            if batch == 10:
                began = time.perf_counter()
            client.push_pull(Progress(epoch=0, batch=batch + 1, batches=1, rows=workload.BATCH))
        seconds = time.perf_counter() - began
        client.finish()
    return seconds


class Workers:
    """The workers' processes."""

    def __init__(self, count: int, rows: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--work", str(rank), "--rows", str(rows)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"

    def run(self, strategy: Strategy | None, window: int) -> tuple[float, float, float]:
        """Seconds of the slowest worker, the most that one of them spent in exchanges, and the
        processor's seconds of a worker."""
        job = base64.b64encode(pickle.dumps((strategy, window))).decode()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(job + "\n")
            process.stdin.flush()
        lines = [p.stdout.readline().split() for p in self._processes if p.stdout is not None]
        used = statistics.mean(float(line[2]) for line in lines)
        return max(float(line[0]) for line in lines), max(float(line[1]) for line in lines), used

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _processor_s(pid: int) -> float:
    """What a process has used of the processor so far."""
    with open(f"/proc/{pid}/stat") as file:
        numbers = file.read().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--work", type=int)
    parser.add_argument("--only", nargs="*", help="cases whose names begin so; bare is always run")
    args = parser.parse_args()
    if args.work is not None:
        work(args.work, args.rows)
        return
    from sparkdl.learner.state.model_weights import model_layout, read_model

    model = workload.make_model()
    layout = model_layout(model)
    center = read_model(model, layout)
    with ExitStack() as stack:
        workers = Workers(args.workers, args.rows)
        stack.callback(workers.close)

        def run(case: Case) -> tuple[float, float, float, float]:
            if case.all_reduce:
                return run_all_reduce(case)
            if case.rule is None:
                return *workers.run(None, case.window), 0.0
            rule: Any = case.rule.bind(args.workers)
            config = ServerConfig(layout, rule, args.workers, mode=args.transport)
            with ServerProcess(config, center) as server:
                strategy = ServerStrategy(server.endpoint, layout, rule, on_nan=case.on_nan)
                server.wait_ready()
                before = _processor_s(server.pid)
                told = workers.run(strategy, case.window)
                return *told, (_processor_s(server.pid) - before) / args.workers

        def run_all_reduce(case: Case) -> tuple[float, float, float, float]:
            listen = ListenOptions("socket", 0, "127.0.0.1", "127.0.0.1", web=False)
            options: Any = {"bind_host": "127.0.0.1"}
            gradients = AllReduceStrategy(
                secrets.token_bytes(32), layout, "builtin", options, on_nan=case.on_nan
            )
            with CoordinatorHost(Settings(args.workers), listen) as host:
                return *workers.run(BarrierStrategy(gradients, host.endpoint), case.window), 0.0

        wanted = ("bare", *(args.only or [""]))
        cases = [case for case in CASES if case.name.startswith(wanted)]
        for case in cases:
            run(case)
        found: dict[str, list[tuple[float, float, float, float]]] = {c.name: [] for c in cases}
        for _ in range(args.repeats):
            for case in cases:
                found[case.name].append(run(case))
    steps = -(-args.rows // workload.BATCH)
    bare = statistics.median(told[0] for told in found["bare"]) / steps
    print(
        "| case | ms per step | rows/s, all workers | ms in an exchange | ms longer than bare "
        "| processor ms of a worker's step | and of the server |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        step, within, used, served = (
            statistics.median(told[i] for told in found[case.name]) for i in range(4)
        )
        step /= steps
        exchanges = -(-steps // max(1, case.window))
        longer = case.longer(step, bare)
        cells = [
            f"{1e3 * step:.3f}" if case.window else "",
            f"{args.workers * args.rows / (step * steps):,.0f}" if case.window else "",
            f"{1e3 * within / exchanges:.2f}" if case.rule is not None else "",
            "" if longer is None else f"{1e3 * longer:.2f}",
            f"{1e3 * used / steps:.3f}",
            f"{1e3 * served / steps:.3f}",
        ]
        print("| " + " | ".join([case.name, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
