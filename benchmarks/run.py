"""Runs every benchmark, one after the other, and prints their tables (``make bench``)."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPTS = [
    ("training.py", "--repeats", "5"),
    ("barrier_start.py",),
    ("exchange.py", "--repeats", "5"),
    ("inference.py", "--rows", "1000000"),
    ("generation.py",),
    ("large_embeddings.py",),
    ("tabular.py",),
    ("readers.py",),
    ("out_of_core.py",),
    ("memory.py",),
    ("recovery.py",),
    ("learning.py",),
    ("rules.py",),
    ("rules.py", "--many", "--seeds", "5", "--workers", "2", "8", "32"),
    ("high_rates.py",),
    ("all_reduce.py", "--large"),
    ("all_reduce.py", "--hosts"),
    ("scale.py",),
    ("scale.py", "--only", "servers"),
    ("table_servers.py",),
    ("strangers.py",),
    ("encryption.py",),
    ("tables.py",),
    ("tables.py", "--files"),
    ("classes.py",),
    ("classes.py", "--memory"),
    ("recompute.py",),
    ("tfrecord.py",),
    ("ftrl.py",),
    ("tune.py",),
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
