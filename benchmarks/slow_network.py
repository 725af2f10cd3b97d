"""Training over links of 100 Mbit/s: what codecs and DiLoCo save.

    python benchmarks/slow_network.py [--mbit 100] [--only codecs diloco] [--codecs none topk ...]
                                      [--relay] [--quick]

Two workers and a parameter server, each on a host of its own. Hosts are network namespaces whose
links a token bucket limits in both directions; where these are not permitted (or with ``--relay``)
a relay before the server forwards at that rate. Which one is printed.

1. A network of 25 million values (100 MB), exact synchronous training, an exchange each step, the
   server's replies encoded too: seconds per step of each codec against none.
2. MNIST with the small CNN: an exchange each step against local SGD and DiLoCo, at equal epochs:
   test loss, bytes, seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(__file__))
import datasets
import numpy as np
import workload
from limited_hosts import LARGE, Hosts, Job, make_model

SMALL = (784, 32, 10)
STEPS = {"none": 2, "fp16": 2, "bf16": 2, "int8": 3}


def codec_jobs(names: list[str], quick: bool) -> Iterator[tuple[str, Job]]:
    """One job for each codec; the sparse ones send 1 %."""
    from sparkdl.codecs import DGC, RandomK, TopK, make_codec
    from sparkdl.rules import BSP

    configured = {"topk": TopK(0.01), "randomk": RandomK(0.01), "dgc": DGC(0.01)}
    job = Job(SMALL if quick else LARGE, workers=2, rule=BSP())
    for name in names:
        codec = None if name == "none" else configured.get(name) or make_codec(name)
        # the first step compiles
        yield name, replace(job, codec=codec, batches=3 if quick else 1 + STEPS.get(name, 6))


def codec_table(hosts: Hosts, args: argparse.Namespace) -> str:
    rows: list[list[str]] = []
    base = None
    for name, job in codec_jobs(args.codecs, args.quick):
        told = hosts.run(job)
        seconds = statistics.median(b - a for t in told for a, b in pairwise(t.steps[1:]))
        sent, received = (
            statistics.median(b[i] - a[i] for t in told for a, b in pairwise(t.moved[1:])) / 1e6
            for i in (0, 1)
        )
        base = seconds if name == "none" else base
        faster = "" if base is None else f"{base / seconds:.1f}"
        rows.append([name, f"{sent:.2f}", f"{received:.2f}", f"{seconds:.2f}", faster])
        print("  ", *rows[-1], flush=True)
    header = ["codec", "MB sent per step", "MB received per step", "seconds per step", "× faster"]
    return workload.table(header, rows)


def diloco_table(hosts: Hosts, args: argparse.Namespace) -> str:
    from sparkdl.learner.state.model_weights import model_layout, write_model
    from sparkdl.rules import BSP, DiLoCo

    job = Job((), workers=2, epochs=1 if args.quick else args.epochs, batches=250)
    job = replace(job, batches=4) if args.quick else job
    cases = [
        ("exchange each step", replace(job, rule=BSP())),
        *(
            (f"local SGD, every {k}", replace(job, rule=BSP(payload="delta"), window=k))
            for k in args.windows
        ),
        *((f"DiLoCo, every {k}", replace(job, rule=DiLoCo(), window=k)) for k in args.windows),
    ]
    _, _, x, y = datasets.mnist()
    judge = make_model(())
    rows: list[list[str]] = []
    base = 0.0
    for name, job in cases:
        results = []
        for seed in range(args.seeds):
            told = hosts.run(replace(job, seed=seed))
            moved = statistics.fmean(sum(t.moved[-1]) for t in told) / 1e6
            base = base or moved
            write_model(judge, model_layout(judge), np.load(hosts.directory / "0.npy"))
            judged = judge.evaluate(x, y, verbose=0, return_dict=True)
            seconds = max(t.steps[-1] - t.steps[0] for t in told)
            results.append((judged["loss"], judged["accuracy"], seconds))
        losses, accuracies, times = zip(*results, strict=True)
        rows.append([
            name, _spread(losses), _spread(accuracies), f"{moved:.2f}",
            f"{base / moved:.0f}", f"{statistics.median(times):.1f}",
        ])  # fmt: skip
        print("  ", *rows[-1], flush=True)
    return workload.table(
        ["", "test loss", "test accuracy", "MB per worker", "fewer bytes, ×", "seconds"], rows
    )


def _spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, or one value."""
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def main() -> None:
    from sparkdl.codecs import codec_names

    known = ["none", *(name for name in codec_names() if name != "none")]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--only", nargs="*", default=["codecs", "diloco"])
    parser.add_argument("--codecs", nargs="*", default=known, choices=known)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1, help="of the runs on MNIST")
    parser.add_argument("--windows", type=int, nargs="*", default=[10, 25, 50])
    parser.add_argument("--relay", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a small network: does it run?")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="sparkdl-slow-") as directory,
        Hosts(2, args.mbit, directory, args.relay) as hosts,
    ):
        print(f"Two workers and a server: {hosts.description}\n", flush=True)
        if "codecs" in args.only:
            print(codec_table(hosts, args), "\n", flush=True)
        if "diloco" in args.only and datasets.folder() is not None:
            print(diloco_table(hosts, args), flush=True)


if __name__ == "__main__":
    main()
