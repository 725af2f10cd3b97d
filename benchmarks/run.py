"""Runs every benchmark, one after the other, and prints their tables (``make bench``)."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPTS = [
    ("training.py", "--repeats", "5"),
    ("learning.py",),
    ("transport.py", "--rule", "none"),
    ("transport.py", "--rule", "downpour"),
    ("strangers.py",),
    ("rule_cost.py",),
    ("all_reduce.py", "--large"),
    ("two_hosts.py",),
    ("large_model.py",),
    ("rules.py",),
    ("many_workers.py",),
    ("many_workers.py", "--optimizer", "sgd", "--workers", "2", "8", "32"),
    ("stragglers.py",),
    ("slow_network.py",),
    ("overlap.py",),
    ("topologies.py",),
    ("scale.py",),
    ("exchange.py", "--repeats", "5"),
    ("high_rates.py",),
    ("encryption.py",),
    ("inference.py", "--rows", "1000000"),
    ("pipelines.py",),
    ("tune.py",),
    ("tracking.py", "--epochs", "20"),
    ("tfrecord.py",),
    ("readers.py",),
    ("feeding.py", "--rows", "1000000", "--spark", "--frame"),
    ("embeddings.py",),
    ("tables.py",),
    ("tables.py", "--files"),
    ("table_peers.py",),
    ("ftrl.py",),
    ("classes.py",),
    ("classes.py", "--memory"),
    ("recompute.py",),
]


def main() -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    failed = []
    for script, *arguments in SCRIPTS:
        print(f"\n## benchmarks/{script} {' '.join(arguments)}\n", flush=True)
        done = subprocess.run(
            [sys.executable, os.path.join(here, script), *arguments],
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            failed.append(script)
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
