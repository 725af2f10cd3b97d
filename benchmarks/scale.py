"""From constants measured here to clusters of 4,096 workers, by discrete-event simulation.

    python benchmarks/scale.py [--only check predict servers] [--mbit 400] [--plot FILE.svg]
                               [--quick]

1. *check*: two to four real workers, each on a host with a limited link (network namespaces),
   train a real model over a real server or ring; the simulation (``support/simulation.py``)
   predicts the seconds per step from constants that are measured first, with one worker:
   computing beside the others, the link's rate, the time of an exchange of very few bytes.
2. *predict*: an exchange of 25 million values after each step, from 2 to 4,096 workers, on links
   of 1, 10 and 100 Gbit/s, with this machine's constants, and with an accelerator that computes
   a step many times as fast.
3. *servers*: a round and an asynchronous exchange with 1, 2 and 4 parameter servers, beside what
   the links allow (``support/several_servers.py``).
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(__file__))
import numpy as np
import workload
from support import several_servers
from support.limited_hosts import LARGE, Hosts, Job
from support.simulation import TOPOLOGIES, Machine, ring_seconds, server_seconds

MIDDLE = (784, 1024, 1024, 10)
"""1.9 million values (7.5 MB)."""
TINY = (784, 4, 10)
GBIT = 125e6
PORT, SIZE, CHUNK = 7411, 20_000_000, 1 << 18
"""Of the connection that measures a link."""
ACCELERATOR = 50.0


def size_of(sizes: tuple[int, ...]) -> float:
    """Bytes of a network of dense layers."""
    return 4.0 * sum(a * b + b for a, b in pairwise(sizes))


def per_step(told: list[Any]) -> float:
    """Mean seconds per exchange, over the workers."""
    return statistics.fmean((t.steps[-1] - t.steps[0]) / (len(t.steps) - 1) for t in told)


# -- the check ------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="sparkdl-scale-") as directory,
        # a longer queue, as no switch has it, would hold acknowledgements up behind data
        Hosts(4, args.mbit, directory, queue_ms=10) as hosts,
    ):
        if hosts.network is None:
            print("The check needs network namespaces; skipped.")
            return
        print(f"Real workers: {hosts.description}\n", flush=True)
        print(check_table(hosts, args), flush=True)


def check_table(hosts: Hosts, args: argparse.Namespace) -> str:
    """Predicted and measured seconds per step, for each kind of exchange, 2 to 4 workers."""
    from sparkdl.rules import BSP, Downpour

    sizes, batches = (TINY, 3) if args.quick else (MIDDLE, 12)
    job = Job(sizes, 1, batches=batches, batch_size=8 if args.quick else 256)
    size = size_of(sizes)
    counts = [2] if args.quick else [2, 3, 4]
    tiny = replace(job, sizes=TINY, batches=30, batch_size=1)
    for cold in (job, tiny):  # compiles all kinds of steps
        cold = replace(cold, workers=max(counts), batches=2)
        for same in (cold, replace(cold, alone="delta"), replace(cold, alone="gradient")):
            hosts.run(same)
    local = {
        (payload, count): per_step(hosts.run(replace(job, workers=count, alone=payload)))
        for payload in ("delta", "gradient")
        for count in [1, *counts]
    }
    alone = per_step(hosts.run(replace(tiny, alone="gradient")))
    exchange = max(1e-4, per_step(hosts.run(replace(tiny, rule=BSP()))) - alone)
    tiny_ring = per_step(hosts.run(replace(tiny, workers=2)))
    tiny_two = per_step(hosts.run(replace(tiny, workers=2, alone="gradient")))
    one = per_step(hosts.run(replace(job, rule=BSP())))
    apply = apply_rate(int(size // 4))
    moving = max(1e-4, one - local["gradient", 1] - exchange - size / apply)
    link = 2 * size / moving
    ring_s = max(tiny_ring - tiny_two, 0.0) / 2
    duplex = duplex_share(hosts)
    print(
        f"measured: computing {1e3 * local['gradient', 1]:.0f} ms a step, link "
        f"{link / 1e6:.1f} MB/s ({100 * duplex:.1f} % of it both ways at once), an exchange "
        f"of next to nothing {1e3 * exchange:.2f} ms "
        f"(ring of two: {2e3 * ring_s:.2f} ms), server adds {apply / 1e9:.1f} GB/s\n",
        flush=True,
    )
    rows = []
    for count in counts:
        base = Machine(0.0, link, exchange / 2, apply, duplex=duplex)
        delta = replace(base, compute_s=local["delta", count])
        gradient = replace(base, compute_s=local["gradient", count])
        ring = replace(gradient, latency_s=ring_s)
        # Left to themselves the workers stay in step for some ten exchanges before they spread out;
        # they begin spread out, as they are for the rest of a long run.
        apart = server_seconds(delta, count, size, steps=200) / count
        longer = 2 * batches  # no two exchanges are alike
        for name, predicted, real in (
            ("server, asynchronous",
             server_seconds(delta, count, size, steps=longer, stagger_s=apart),
             replace(job, rule=Downpour(), batches=longer, stagger_s=apart)),
            ("server, synchronous", server_seconds(gradient, count, size, steps=batches,
             waits=True), replace(job, rule=BSP())),
            ("ring", ring_seconds(ring, count, size, steps=batches), job),
        ):  # fmt: skip
            measured = per_step(hosts.run(replace(real, workers=count)))
            rows.append([
                name, str(count), f"{predicted:.3f}", f"{measured:.3f}",
                f"{100 * (predicted / measured - 1):+.0f} %",
            ])  # fmt: skip
            print("  ", *rows[-1], flush=True)
    header = ["exchange", "workers", "predicted s per step", "measured s per step", "off by"]
    return workload.table(header, rows)


def duplex_share(hosts: Hosts) -> float:
    """Share of a link's rate that plain sockets get where both directions are busy."""
    network = hosts.network
    assert network is not None
    command = [sys.executable, os.path.abspath(__file__)]
    with subprocess.Popen(
        [*network.command(1), *command, "listen", network.address(1)], stdout=subprocess.PIPE
    ) as listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        told = subprocess.run(
            [*network.command(2), *command, "connect", network.address(1)],
            capture_output=True, check=True, timeout=120,
        )  # fmt: skip
    one, both = map(float, told.stdout.split())
    return min(1.0, both / one)


def apply_rate(size: int) -> float:
    """Bytes per second that the server's plain rule adds to a center of ``size`` values."""
    from sparkdl.rules import Commit, Downpour

    center, delta = np.zeros(size, np.float32), np.ones(size, np.float32)
    commit = Commit(0, 1, 0, 0, 1, 1)
    seconds = best(lambda: Downpour().update(center, delta, {}, commit, center))
    return center.nbytes / seconds


def best(work: Any, repeats: int = 7) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# -- the prediction -------------------------------------------------------------------------------


def calibrate(args: argparse.Namespace) -> Machine:
    """This machine's constants; the link is loopback's."""
    from sparkdl.rules import BSP

    sizes = TINY if args.quick else LARGE
    job = Job(sizes, 1, batches=6, batch_size=32)
    with (
        tempfile.TemporaryDirectory(prefix="sparkdl-scale-") as directory,
        Hosts(1, 1e6, directory, relay=True) as hosts,  # a relay that limits nothing
    ):
        hosts.run(replace(job, alone="gradient", batches=2))
        told = hosts.run(replace(job, alone="gradient"))
        times = [b - a for a, b in pairwise(told[0].steps)]
        compute = statistics.median(times)
        spread = statistics.pstdev(math.log(t) for t in times)
        tiny = replace(job, sizes=TINY, batches=60, batch_size=1)
        hosts.run(replace(tiny, alone="gradient", batches=2))
        alone = per_step(hosts.run(replace(tiny, alone="gradient")))
        latency = max(per_step(hosts.run(replace(tiny, rule=BSP()))) - alone, 1e-5) / 2
    size = 1_000_000 if args.quick else 25_000_000
    source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
    copy = source.nbytes / best(lambda: np.copyto(target, source))
    apply = apply_rate(size)
    made = Machine(
        compute, loopback_rate(), latency, apply, memory=apply, copy=copy, spread=min(spread, 0.1)
    )
    constants = [
        ["computing a step of 32 rows, one core", f"{compute:.3f} s"],
        ["spread of a step (standard deviation of its logarithm)", f"{made.spread:.3f}"],
        ["one way of an exchange of next to nothing", f"{1e6 * latency:.0f} µs"],
        ["socket transport over loopback", f"{made.link / 1e9:.2f} GB/s"],
        ["server's plain rule, 100 MB", f"{made.apply / 1e9:.2f} GB/s"],
        ["memory copy, 100 MB", f"{copy / 1e9:.2f} GB/s"],
    ]
    print(workload.table(["constant", "measured here"], constants), "\n", flush=True)
    return made


def loopback_rate(size: int = 100_000_000) -> float:
    """Bytes per second of a push over the socket transport, in one process."""
    from sparkdl.ps.client import Progress, connect
    from sparkdl.ps.server import ServerConfig
    from sparkdl.rules import SingleWorker
    from sparkdl.transport.address import Endpoint, Listeners
    from sparkdl.transport.server import Server
    from sparkdl.weights import Layout

    layout = Layout.of([("w", (size // 4,), "float32")])
    config = ServerConfig(layout, SingleWorker(), 1, mode="socket")
    service = config.service(np.zeros(layout.size, np.float32))
    server = Server(service, config.token, Listeners.bind(config.listen, None), 1).start()
    endpoint = Endpoint(server.address, config.token)
    with server, connect(endpoint, rank=0, layout=layout) as client:
        client.join(rows=1, batches_per_epoch=100)
        pull = best(client.pull)
        push = best(lambda: client.push(Progress(0, 1, 1, 1, 0.1)))
    return size / max(pull, push - size / apply_rate(size // 4))


def predict(args: argparse.Namespace) -> None:
    machine = calibrate(args)
    size = size_of(LARGE)
    counts = [2, 4, 8] if args.quick else [2**n for n in range(1, 13)]
    shown = [count for count in counts if count in (2, 4, 8, 64, 512, 4096)]
    curves: dict[tuple[float, float], dict[str, list[float]]] = {}
    rows = []
    for faster in (1.0, ACCELERATOR):
        for gbit in (1, 10, 100):
            link = min(gbit * GBIT, machine.link) if faster == 1.0 else gbit * GBIT
            there = replace(machine, compute_s=machine.compute_s / faster, link=link)
            found = {
                name: [share(name, there, count, size) for count in counts] for name in TOPOLOGIES
            }
            curves[faster, gbit] = found
            for count in shown:
                at = counts.index(count)
                rows.append([
                    f"{1e3 * there.compute_s:.0f} ms", f"{gbit} Gbit/s", f"{count:,}",
                    *(f"{100 * found[name][at]:.0f} %" for name in TOPOLOGIES),
                ])  # fmt: skip
    header = ["computing a step", "link", "workers", *TOPOLOGIES]
    print(workload.table(header, rows), flush=True)
    if args.plot:
        plot(curves, counts, machine, args.plot)


def share(name: str, machine: Machine, workers: int, size: float) -> float:
    """Share of the speed that ``workers`` would have without any exchange."""
    few = 32 if name == "local SGD" else 4 if workers > 128 else 16
    return machine.compute_s / TOPOLOGIES[name](machine, workers, size, steps=few)


def plot(curves: Any, counts: list[int], machine: Machine, path: str) -> None:
    """Efficiency over the number of workers, a panel for each speed of computing and of links."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sparkdl"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(11, 6), sharex=True, sharey=True)
    for panel, ((faster, gbit), found) in zip(panels.flat, curves.items(), strict=True):
        for name, values in found.items():
            panel.plot(counts, [100 * v for v in values], marker=".", label=name)
        panel.set_xscale("log", base=2)
        panel.set_title(f"{1e3 * machine.compute_s / faster:.0f} ms a step, {gbit} Gbit/s")
        panel.grid(alpha=0.3)
    for panel in panels[1]:
        panel.set_xlabel("workers")
    for panel in panels[:, 0]:
        panel.set_ylabel("% of perfect speed")
    panels[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


# -- what TCP carries over a link ------------------------------------------------------------------


def send(connection: socket.socket) -> None:
    connection.sendall(bytes(SIZE))


def receive(connection: socket.socket) -> None:
    left, buffer = SIZE, bytearray(CHUNK)
    while left:
        count = connection.recv_into(buffer, min(CHUNK, left))
        if not count:
            raise ConnectionError("the other end is gone")
        left -= count


def together(connection: socket.socket, *works: Callable[[socket.socket], None]) -> float:
    """Bytes per second and direction, measured until both ends have sent and received all."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work, connection) for work in works]:
            future.result()
    connection.sendall(b".")
    connection.recv(1)
    return SIZE / (time.perf_counter() - started)


def measure_link(role: str, address: str) -> None:
    """One end of a link, ``'listen'`` or ``'connect'``; prints bytes/s: one way, both ways.

    Where both directions are busy, the acknowledgements of what comes in take a part of the rate of
    what goes out.
    """
    if role == "listen":
        with socket.create_server((address, PORT)) as listener:
            listener.settimeout(60)
            print("listening", flush=True)
            connection = listener.accept()[0]
    else:
        connection = socket.create_connection((address, PORT), timeout=60)
    with connection:
        connection.settimeout(60)
        one = together(connection, receive if role == "listen" else send)
        both = together(connection, receive, send)
    if role == "connect":
        print(one, both, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=["check", "predict"], choices=["check", "predict", "servers"]
    )
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--plot", help="an SVG file to write")
    parser.add_argument("--quick", action="store_true", help="small: does it run?")
    args = parser.parse_args()
    if "check" in args.only:
        check(args)
    if "predict" in args.only:
        predict(args)
    if "servers" in args.only:
        several_servers.main([])


if __name__ == "__main__":
    if sys.argv[1:2] in (["listen"], ["connect"]):
        measure_link(*sys.argv[1:])
    else:
        main()
