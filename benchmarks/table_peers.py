"""A table's rows on one processor, beside the map of TensorFlow Recommenders Addons (TFRA).

TFRA 0.8.1 has an environment of its own (``.venv-tfra``, with TensorFlow 2.16), made once. Both
take the same ids, each once, and the same gradients, alternately; medians are printed.

    python benchmarks/table_peers.py [--rows 100000 1000000] [--repeats 7] [--dim 16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import workload
from tables import BATCH, filled, ids_of, seconds

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".venv-tfra"
PACKAGES = ("tensorflow==2.16.2", "tf_keras==2.16.0", "numpy<2")


def install() -> str:
    """The Python of the peer's environment."""
    python = str(PEER / "bin" / "python")
    if not PEER.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES], check=True)
        own = ["tensorflow-recommenders-addons==0.8.1", "typeguard", "packaging"]
        subprocess.run([*pip, "--no-deps", *own], check=True)
    return python


def compare(python: str, rows: int, dim: int, repeats: int, folder: str) -> list[str]:
    every = ids_of(np.arange(rows))
    np.save(f"{folder}/all.npy", every)
    store, _ = filled(rows, dim, "adagrad")
    peer = subprocess.Popen(
        [python, str(ROOT / "benchmarks" / "peer_tfra.py")], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(json.dumps({"fill": rows, "dim": dim, "ids": f"{folder}/all.npy"}) + "\n")
    peer.stdin.flush()
    answer = json.loads(peer.stdout.readline())
    assert answer["rows"] == rows, answer
    rng, times = np.random.default_rng(0), []
    for _ in range(repeats + 1):
        chosen = every[np.unique(rng.integers(0, rows, BATCH))]
        rng.shuffle(chosen)
        gradients = rng.normal(size=(len(chosen), dim)).astype(np.float32)
        np.savez(f"{folder}/batch.npz", ids=chosen, gradients=gradients)
        pulled = seconds(store.pull, chosen)
        own = [pulled, pulled + seconds(store.push, chosen, gradients, 0.05)]
        peer.stdin.write(json.dumps({"file": f"{folder}/batch.npz"}) + "\n")
        peer.stdin.flush()
        theirs = json.loads(peer.stdout.readline())
        times.append([len(chosen) / s for s in (*own, *theirs)])
    peer.stdin.close()
    peer.wait(60)
    pull, step, their_pull, their_step = (
        statistics.median(column) for column in zip(*times[1:], strict=True)
    )
    return [f"{rows:,}", f"{pull:,.0f}", f"{their_pull:,.0f}", f"{pull / their_pull:.2f}",
            f"{step:,.0f}", f"{their_step:,.0f}", f"{step / their_step:.2f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()
    python = install()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one processor for both
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            compare(python, rows, options.dim, options.repeats, folder) for rows in options.rows
        ]
    header = ["rows", "pulled/s", "TFRA", "×", "pull and Adagrad step, rows/s", "TFRA", "×"]
    print(workload.table(header, lines))


if __name__ == "__main__":
    main()
