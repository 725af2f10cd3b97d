"""How much of an exchange the backward pass hides: steps of all-reduce where both take as long.

    python benchmarks/overlap.py [--backend tensorflow torch] [--batch-size 1024] [--rounds 3]
                                 [--mbit 0] [--parts 4 8 16] [--quick]

Two workers, each in a network namespace with a limited link, train a network of 25 million values
(100 MB). The rate of the link is chosen so that the exchange alone takes as long as the step alone,
or is ``--mbit``. Printed are, each a median of all steps of all rounds, in which the contenders
take turns:

- c: a step without other workers (computed, handed over, applied), and its processor time;
- m: the exchange of as many bytes without computing, and its processor time x;
- for each way to cut the gradient the step, when its first part left, and the ratio step / max(c,
  m): 1 if one hid the other, (c + m) / max(c, m) without any overlap;
- two limits of that ratio with a step that ends with its exchange. *First part*: nothing can be
  sent before the backward pass has come to the last layers, (first part + m) / max(c, m).
  *Processor*: the cores that compute move the bytes, too, (c + x) / max(c, m) if each worker has
  one core. What the kernel does for the emulated link outside of the workers' own calls (soft
  interrupts) is printed beside it, and is in no limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(__file__))
import workload
from limited_hosts import LARGE, Hosts, Job, Told

SMALL = (784, 256, 512, 10)
WHOLE = 1 << 30
FAST_MBIT = 2000.0
"""For the first look at c, which needs no link."""


@dataclass
class Seen:
    """Seconds of one contender, over all rounds."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)

    def take(self, told: list[Told], kernel_s: float) -> None:
        """Adds the steps of one job but the first one of each worker, which compiles, and the
        second, in which PyTorch's parts first leave early."""
        for worker in told:
            self.step += [b - a for a, b in pairwise(worker.steps[2:])]
            self.cpu += [b - a for a, b in pairwise(worker.cpu_s[2:])]
            pairs = zip(worker.steps[2:-1], worker.begun[2:], strict=False)
            self.first += [begun - start for start, begun in pairs]
        self.kernel.append(kernel_s / (len(told[0].steps) - 1))

    def median(self, name: str) -> float:
        values = getattr(self, name)
        return statistics.median(values) if values else 0.0


def kernel_seconds() -> float:
    """Processor time of interrupts on all cores since the start."""
    with open("/proc/stat") as file:
        numbers = [int(word) for word in file.readline().split()[1:]]
    return sum(numbers[5:7]) / os.sysconf("SC_CLK_TCK")


def contenders(job: Job, parts: list[int]) -> dict[str, Job]:
    """All ways that take turns, by the name in the table."""
    made = {
        "step alone": replace(job, alone="step"),
        "exchange alone": replace(job, idle=True),
        "one part": replace(job, part_bytes=WHOLE),
        "whole variables, 16 MiB": replace(job, part_bytes=16 << 20, cuts=False),
    }
    for size in parts:
        made[f"cut, {size} MiB"] = replace(job, part_bytes=size << 20)
    return made


def run(job: Job, backend: str, args: argparse.Namespace) -> str:
    """The table of one backend."""
    os.environ["KERAS_BACKEND"] = backend
    mbit = args.mbit
    size_bytes = 4 * sum((a + 1) * b for a, b in pairwise(job.sizes))
    with tempfile.TemporaryDirectory() as directory:
        if not mbit:
            with Hosts(2, FAST_MBIT, directory) as hosts:
                seen = Seen()
                seen.take(hosts.run(replace(job, alone="step")), 0.0)
            # two workers send as many bytes as the gradient has, each way; headers and
            # acknowledgements take a twentieth
            mbit = round(1.05 * size_bytes * 8e-6 / seen.median("step"), 1)
        found: dict[str, Seen] = defaultdict(Seen)
        with Hosts(2, mbit, directory) as hosts:
            if hosts.network is None:
                return "links cannot be limited here, so nothing was measured"
            print(
                f"{backend}: {hosts.description}; batches of {job.batch_size}, "
                f"{size_bytes / 1e6:.1f} MB; load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            for _ in range(args.rounds):
                for name, each in contenders(job, args.parts).items():
                    before = kernel_seconds()
                    told = hosts.run(each)
                    found[name].take(told, kernel_seconds() - before)
    return table(found)


def table(found: dict[str, Seen]) -> str:
    alone, exchange = found.pop("step alone"), found.pop("exchange alone")
    c, m, x = alone.median("step"), exchange.median("step"), exchange.median("cpu")
    longest = max(c, m)
    print(
        f"c {c:.3f} s (processor {alone.median('cpu'):.3f} s), m {m:.3f} s (processor x {x:.3f} s, "
        f"kernel's interrupts {exchange.median('kernel'):.3f} s for both workers); no overlap: "
        f"{(c + m) / longest:.2f}; processor's limit {max(1.0, (c + x) / longest):.2f}; load "
        f"average {os.getloadavg()[0]:.1f}\n"
    )
    rows = []
    for name, seen in found.items():
        step, first = seen.median("step"), seen.median("first")
        limit = max(1.0, (first + m) / longest)
        rows.append([
            name, f"{step:.3f}", f"{first:.3f}", f"{step / longest:.2f}", f"{limit:.2f}",
            f"{seen.median('cpu'):.3f}",
        ])  # fmt: skip
    header = ["parts", "step, s", "first part after, s", "step / max(c, m)", "limit: first part",
              "processor per step, s"]  # fmt: skip
    return workload.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", nargs="+", default=["tensorflow", "torch"])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=0.0, help="0: so that m is about c")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8, 16], help="MiB")
    parser.add_argument("--quick", action="store_true", help="a small network, one round")
    args = parser.parse_args()
    job = Job(LARGE, workers=2, batches=5, batch_size=args.batch_size)
    if args.quick:
        job, args.rounds, args.parts = replace(job, sizes=SMALL, batch_size=64), 1, args.parts[:1]
    for backend in args.backend:
        print(run(job, backend, args), "\n", flush=True)


if __name__ == "__main__":
    main()
