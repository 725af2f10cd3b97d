"""Claim: encrypted connections carry 100 MB at 0.8 GB/s and more over loopback.

A push and a pull of one buffer over the framed socket and over HTTP, and an all-reduce of two ranks
that count as two hosts, each plain and with TLS; all alternate within each repetition. An
all-reduce of two ranks sends the array once in each direction at the same time, so its rate counts
the bytes of the array.

    python benchmarks/encryption.py [--megabytes 100] [--repetitions 5] [--megabit 1000]

With ``--megabit`` all this happens on a host of its own (a network namespace; needs root, ``ip``
and ``tc``) whose loopback carries so many Mbit/s, both directions together: TLS is to be as fast as
plain there, where the link is what limits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from all_reduce import Contender, be_rank, join_ranks
from support.limited_hosts import LimitedNetwork

from sparkdl.ps.client import Progress, connect
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.rules.rule import Commit, Rule, State
from sparkdl.weights import FloatArray, Layout
from sparkdl.wire.tls import Certificate

WANTED = 0.8
AS_FAST = 0.95
"""Of the plain rate: the noise between two runs over the same link."""
STEP = Progress(epoch=0, batch=1, batches=1, rows=1)


class NoRule(Rule):
    """Leaves the center alone."""

    name = "none"

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        pass


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def server_actions(
    stack: contextlib.ExitStack, layout: Layout, certificate: Certificate | None
) -> dict[str, Callable[[], object]]:
    """Push and pull over each transport of one server."""
    center = np.zeros(layout.size, np.float32)
    config = ServerConfig(layout, NoRule(), 2, certificate=certificate)
    server = stack.enter_context(ServerProcess(config, center))
    actions: dict[str, Callable[[], object]] = {}
    for rank, mode in enumerate(("socket", "http")):
        client = stack.enter_context(connect(server.endpoint, mode, rank=rank, layout=layout))
        client.join()
        client.buffer[...] = 0
        actions[f"{mode} push"] = lambda c=client: c.push(STEP)  # type: ignore[misc]
        actions[f"{mode} pull"] = client.pull
    return actions


def ring(certificate: Certificate | None) -> Contender:
    """Two ranks with a ring between them."""
    ranks = []
    for rank in range(2):
        options = {"host_id": str(rank), "bind_host": "127.0.0.1", "certificate": certificate}
        ranks.append((be_rank, ("builtin", rank, options)))
    return join_ranks(Contender("encrypted" if certificate else "plain", ranks))


def measure(megabytes: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """What -> 'plain' and 'encrypted' -> seconds."""
    layout = Layout.of([("weights", (megabytes * 250_000,), "float32")])
    times: dict[str, dict[str, list[float]]] = {}
    ways = {"plain": None, "encrypted": Certificate.make()}
    with contextlib.ExitStack() as stack:
        actions = {name: server_actions(stack, layout, c) for name, c in ways.items()}
        rings = {name: ring(certificate) for name, certificate in ways.items()}
        for made in rings.values():
            stack.callback(made.close)
        for repetition in range(repetitions + 1):
            for name in ways:
                found = {what: timed(action) for what, action in actions[name].items()}
                rings[name].measure(layout.size_bytes, 1)
                found["all-reduce, 2 ranks"] = rings[name].times[layout.size_bytes][-1]
                for what, seconds in found.items():
                    if repetition:  # the first one touches the pages
                        times.setdefault(what, {}).setdefault(name, []).append(seconds)
    return times


def on_a_limited_host(megabit: float, arguments: list[str]) -> int:
    """Runs this script on a host whose loopback has that rate; returns its exit status."""
    with LimitedNetwork(1, megabit) as network:
        bucket = str(max(1 << 17, int(megabit * 125)))
        limit = ["tbf", "rate", f"{megabit:g}mbit", "burst", bucket, "latency", "200ms"]
        command = network.command(0)
        subprocess.run(
            [*command, "tc", "qdisc", "add", "dev", "lo", "root", *limit], check=True, timeout=10
        )
        script = [sys.executable, __file__, "--on-limited-host", *arguments]
        return subprocess.run([*command, *script], check=False, timeout=1800).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--megabit", type=float)
    parser.add_argument("--on-limited-host", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.megabit and not options.on_limited_host:
        sys.exit(on_a_limited_host(options.megabit, sys.argv[1:]))
    size = options.megabytes / 1e3
    link = f", {options.megabit:g} Mbit/s" if options.megabit else ""
    print(f"{options.megabytes} MB, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}{link}")
    print("| what | plain, GB/s | TLS, GB/s (median) | TLS, GB/s (best) | wanted |")
    print("|---|---|---|---|---|")
    for what, found in measure(options.megabytes, options.repetitions).items():
        plain, secured = (size / statistics.median(found[n]) for n in ("plain", "encrypted"))
        best = size / min(found["encrypted"])
        wanted = AS_FAST * plain if options.megabit else WANTED
        row = f"| {what} | {plain:.3f} | {secured:.3f} | {best:.3f} | >= {wanted:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
