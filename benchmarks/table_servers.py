"""Tables on parameter servers over local sockets: what a batch's pull and push take.

    python benchmarks/table_servers.py [--servers 1 2] [--rows 4096] [--fields 26] [--dim 16]
                                       [--table 1000000] [--repeats 40]

One worker against real servers, over the framed socket of the loopback. Ids are drawn from a
Zipf-like law, so that a batch of 4,096 x 26 has about 32,000 distinct ones. Printed are medians,
and the rows that servers pull and push in a second of their processors. With ``--compute`` ms of
computing in each step the waits for rows are given with and without rows that are pulled ahead, by
turns; ids repeat from batch to batch as the law has it. Then the servers write a table of
``--saved`` rows, and the worker goes on meanwhile: its steps per second beside those before.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from sparkdl.coordinator.session import open_session
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.server.config import TablesOfRun, shards_of
from sparkdl.ps.shards.client import ShardsDriver, connect_shards
from sparkdl.ps.shards.rows import ServedRows
from sparkdl.rules import make_rule
from sparkdl.tables.checkpoints import TableCheckpoints
from sparkdl.tables.hashing import mix64
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.weights import NO_VALUES, Layout

LAYOUT = Layout.of([("w", (1024,), "float32")])
FOLDER = tempfile.TemporaryDirectory()
TICKS = os.sysconf("SC_CLK_TCK")


def batches(args: argparse.Namespace, count: int) -> list[np.ndarray]:
    """The distinct ids of some batches."""
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, args.table + 1) ** 1.05
    edges = np.cumsum(weights / weights.sum())
    drawn = [np.searchsorted(edges, rng.random(args.rows * args.fields)) for _ in range(count)]
    return [mix64(np.unique(ids).astype(np.int64)).view(np.int64) for ids in drawn]


def cpu_s(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(servers: int, args: argparse.Namespace) -> str:
    settings = RowStore(args.dim, "adagrad", "uniform", name="ads").settings
    spec = TableSpec("ads", settings)
    config = ServerConfig(LAYOUT, make_rule("downpour"), 1, mode="socket")
    given = batches(args, 8)
    gradients = [np.full((len(ids), args.dim), 1e-3, np.float32) for ids in given]
    with ExitStack() as stack:
        shards = [
            stack.enter_context(ServerProcess(s, np.zeros(s.layout.size, np.float32)))
            for s in shards_of(config, servers, TablesOfRun((spec,), FOLDER.name))
        ]
        empty = np.empty(0, np.float32)
        decides = ServerConfig(LAYOUT, make_rule("downpour"), 1, mode="socket", sharded=True)
        coordinator = stack.enter_context(ServerProcess(decides, empty))
        session = open_session(coordinator.endpoint, rank=0, limits=limits_of(NO_VALUES))
        client = stack.enter_context(
            connect_shards(session, [s.endpoint for s in shards], LAYOUT, config.rule)
        )
        rows = client.open_rows([spec])
        assert isinstance(rows, ServedRows)
        for number, ids in enumerate(given):  # makes the rows
            step(rows, ids, gradients[number], number + 1)
        pulls: list[float] = []
        pushes: list[float] = []
        used = -sum(cpu_s(s.pid) for s in shards)
        count = 0
        for number in range(args.repeats):
            place = number % len(given)
            pulled, pushed = step(rows, given[place], gradients[place], number + 10)
            pulls.append(pulled)
            pushes.append(pushed)
            count += len(given[place])
        used += sum(cpu_s(s.pid) for s in shards)
        waits: dict[bool, list[float]] = {False: [], True: []}
        number = args.repeats + 10
        for ahead in (False, True) * 3:
            for _ in range(12):
                seconds = waited(rows, given, gradients, number, args.compute / 1e3, ahead=ahead)
                waits[ahead].append(seconds)
                number += 1
        rate = while_saving(rows, shards, given, gradients, args) if args.saved else math.nan
    both = [a + b for a, b in zip(pulls, pushes, strict=True)]
    return (
        f"| {servers} | {count // args.repeats:,} | {1e3 * statistics.median(pulls):.1f} "
        f"| {1e3 * statistics.median(pushes):.1f} | {1e3 * statistics.median(both):.1f} "
        f"| {count / used / 1e6:.2f} M | {1e3 * statistics.median(waits[False]):.1f} "
        f"| {1e3 * statistics.median(waits[True]):.1f} | {rate:.2f} |"
    )


def waited(
    rows: ServedRows,
    given: list[np.ndarray],
    gradients: list[np.ndarray],
    number: int,
    compute_s: float,
    *,
    ahead: bool,
) -> float:
    """Seconds of a step beside its computing."""
    place = number % len(given)
    ids, following = given[place], given[(number + 1) % len(given)]
    matrix = np.ones((400, 400), np.float32)
    began = time.perf_counter()
    rows.begin_batch((lambda: [("ads", following)]) if ahead else None)
    _, pulled = rows.pull("ads", ids, training=True)
    before = time.perf_counter()
    while time.perf_counter() < before + compute_s:
        matrix @ matrix
    rows.push(pulled, gradients[place], np.ones(len(ids), np.int64))
    again = time.perf_counter()
    rows.end_step(0, number, 0.1)
    return before - began + time.perf_counter() - again


def while_saving(
    rows: ServedRows,
    shards: list[ServerProcess],
    given: list[np.ndarray],
    gradients: list[np.ndarray],
    args: argparse.Namespace,
) -> float:
    """Steps per second while the servers write their rows, by those before."""
    made = 200_000
    for start in range(0, args.saved, made):
        ids = mix64(np.arange(start, start + made)).view(np.int64)
        step(rows, ids, np.zeros((made, args.dim), np.float32), 20_000 + start)

    def steps_for(until: Callable[[], bool]) -> float:
        began, count = time.perf_counter(), 0
        while not until():
            place = count % len(given)
            step(rows, given[place], gradients[place], args.saved + 100_000 + count)
            count += 1
        return count / (time.perf_counter() - began)

    def after(seconds: float) -> Callable[[], bool]:
        deadline = time.perf_counter() + seconds
        return lambda: time.perf_counter() > deadline

    reference = TableCheckpoints(FOLDER.name).after(b"", 1, ("ads",))
    driver = ShardsDriver([s.endpoint for s in shards], LAYOUT, lambda: None)
    before = steps_for(after(3.0))
    saving = threading.Thread(target=driver.save_rows, args=(reference,))
    saving.start()
    meanwhile = steps_for(lambda: not saving.is_alive())
    driver.close()
    return meanwhile / before


def step(
    rows: ServedRows, ids: np.ndarray, gradients: np.ndarray, batch: int
) -> tuple[float, float]:
    """Seconds of a pull, and of a push."""
    began = time.perf_counter()
    _, number = rows.pull("ads", ids, training=True)
    pulled = time.perf_counter()
    rows.push(number, gradients, np.ones(len(ids), np.int64))
    rows.end_step(0, batch, 0.1)
    return pulled - began, time.perf_counter() - pulled


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--fields", type=int, default=26)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--table", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--compute", type=float, default=40.0)
    parser.add_argument("--saved", type=int, default=4_000_000)
    args = parser.parse_args()
    print(
        "| servers | distinct ids | pull, ms | push, ms | both, ms | rows pulled and pushed per "
        f"CPU s | waits beside {args.compute:g} ms of computing, ms | rows ahead, ms | steps while "
        "writing |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for servers in args.servers:
        print(measure(servers, args), flush=True)


if __name__ == "__main__":
    main()
