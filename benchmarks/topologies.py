"""Would rings in two dimensions, or several TCP streams between two hosts, make an exchange faster?

    python benchmarks/topologies.py [--rate 1e9] [--quick]

1. *streams*: what 1, 2 and 4 TCP connections carry together over a link between two network
   namespaces, at round trips of 0, 5 and 20 ms. Striped rings help where one is below .85 of the
   link.
2. *grid*: the latency of one step of the built-in communicator's ring is measured between the two
   hosts; with it ``simulation.py`` computes steps of 100 ms and an all-reduce of 100 MB, in
   parts of 4 and 16 MB and in one, around one ring and over the best grid, from 4 to 256 hosts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
import workload
from all_reduce import Contender, join_ranks
from network import Host, two_hosts
from simulation import Machine, grid_seconds
from two_hosts import rank_in

COUNTS = ("1", "2", "4")
DELAYS_S = (0.0, 0.0025, 0.01)
LEAST = 20_000
"""Bytes of an array that goes around the ring, not with the records before it."""
GBIT = 125e6
SIZE = 100e6
COMPUTE_S = 0.1


def stream_rates(hosts: tuple[Host, Host]) -> list[float]:
    """Bytes per second of each number of streams."""
    script = str(Path(__file__).with_name("link_rate.py"))
    address = hosts[1].address

    def command(host: Host, role: str) -> list[str]:
        return ["ip", "netns", "exec", host.name, sys.executable, script, role, address, *COUNTS]

    with subprocess.Popen(command(hosts[1], "listen"), stdout=subprocess.PIPE) as listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        done = subprocess.run(
            command(hosts[0], "connect"), capture_output=True, text=True, check=True, timeout=300
        )
    return [float(line) for line in done.stdout.split()]


def ring_step_s(hosts: tuple[Host, Host]) -> float:
    """Seconds of one message of a ring: an all-reduce of two has one with records, and two more."""
    ranks = [(rank_in, (host, "builtin", rank)) for rank, host in enumerate(hosts)]
    contender = join_ranks(Contender("ranks", ranks))
    try:
        for _ in range(5):
            contender.measure(LEAST, 200)
    finally:
        contender.close()
    return workload.median(contender.times[LEAST]) / 3


def best_grid(machine: Machine, hosts: int, parts: int, steps: int) -> tuple[int, float]:
    """Columns and seconds of the fastest grid."""
    columns = [2**n for n in range(1, hosts.bit_length() - 1)]
    found = {
        c: grid_seconds(machine, hosts, SIZE, columns=c, parts=parts, steps=steps) for c in columns
    }
    best = min(found, key=lambda c: found[c])
    return best, found[best]


def grid_table(latency_s: float, quick: bool) -> str:
    rows = []
    steps = 2 if quick else 3
    for gbit in (1, 10, 100):
        machine = Machine(COMPUTE_S, gbit * GBIT, latency_s, spread=0.1)
        for hosts in (4, 16, 64) if quick else (4, 16, 32, 64, 256):
            for parts in (25, 6, 1):
                flat = grid_seconds(machine, hosts, SIZE, parts=parts, steps=steps)
                columns, grid = best_grid(machine, hosts, parts, steps)
                less = f"{100 * (1 - grid / flat):.0f} %"
                rows.append([
                    f"{gbit} Gbit/s", f"{hosts:,}", str(parts), f"{flat:.3f}",
                    f"{hosts // columns} x {columns}", f"{grid:.3f}", less,
                ])  # fmt: skip
    header = ["link", "hosts", "parts", "ring, s per step", "grid", "grid, s per step", "less"]
    return workload.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows, latency_s, how = [], 0.0, ""
    try:
        for delay_s in DELAYS_S:
            with two_hosts(args.rate, delay_s) as (hosts, how):
                rates = stream_rates(hosts)
                latency_s = latency_s or ring_step_s(hosts)
            shares = [f"{8 * rate / args.rate:.2f}" for rate in rates]
            rows.append([f"{2e3 * delay_s:g} ms", *shares])
    except PermissionError as error:
        print(f"two hosts cannot be made here, so nothing was measured: {error}")
        return
    print(f"Share of a link of {args.rate / 1e9:g} Gbit/s ({how}); load {os.getloadavg()[0]:.1f}\n")
    print(workload.table(["round trip", *(f"{n} streams" for n in COUNTS)], rows), "\n")
    print(f"A step of the ring between two hosts takes {1e6 * latency_s:.0f} µs.\n")
    print(grid_table(latency_s, args.quick), flush=True)


if __name__ == "__main__":
    main()
