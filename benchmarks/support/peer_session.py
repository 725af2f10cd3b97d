"""One session of one library for torch_peers.py: a cluster, a DataFrame, some fits; prints JSON.

python benchmarks/support/peer_torch_distributor.py CASE SEED [kill]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from typing import Any

import workload

FITS = 2
EPOCHS_WITH_KILL = 10


class Peer:
    """A library in one session.

    Args:
        case: Which of its ways.
        folder: For files that workers and driver share.
        x: All rows.
        y: Their labels.
        frame: The rows as a cached DataFrame of two partitions.
    """

    def __init__(self, case: str, folder: str, x: Any, y: Any, frame: Any) -> None:
        self.case, self.folder, self.x, self.y, self.frame = case, folder, x, y, frame

    @property
    def epochs(self) -> int:
        """Of each timed call."""
        return workload.EPOCHS

    def start(self) -> None:
        """Starts what the library needs beside Spark."""

    def fit(self, epochs: int, seed: int, marker: str) -> tuple[Any, float]:
        """Trains from the DataFrame; returns what was trained, and the seconds of the loop."""
        raise NotImplementedError

    def loss(self, trained: Any) -> float:
        raise NotImplementedError

    def stop(self) -> None:
        """Ends what ``start`` began."""


def main(peer_class: type[Peer], arguments: list[str]) -> None:
    case, seed, *rest = arguments
    x, y = workload.make_data()
    spark = workload.start_spark(2)
    frame = workload.make_frame(spark, x, y, 2)
    with tempfile.TemporaryDirectory(prefix="sparkdl-peer-") as folder:
        peer = peer_class(case, folder, x, y, frame)
        started = time.perf_counter()
        peer.start()
        start_s = time.perf_counter() - started
        try:
            run = _kill(peer, int(seed), rest[0]) if rest else _speed(peer, int(seed))
        finally:
            peer.stop()
            spark.stop()
    print("\nRESULT " + json.dumps({"start_s": start_s, **run}), flush=True)


def _speed(peer: Peer, seed: int) -> dict[str, Any]:
    calls, loops, losses = [], [], []
    for number in range(FITS):
        started = time.perf_counter()
        trained, seconds = peer.fit(peer.epochs, seed, f"{peer.folder}/{number}.speed")
        calls.append(time.perf_counter() - started)
        loops.append(seconds)
        losses.append(peer.loss(trained))
        print(f"{peer.case}: call {calls[-1]:.1f} s, loop {loops[-1]:.1f} s", file=sys.stderr)
    return {"calls_s": calls, "loops_s": loops, "losses": losses, "epochs": peer.epochs}


def _kill(peer: Peer, seed: int, way: str) -> dict[str, Any]:
    """An undisturbed fit, and the same one with a killed worker."""
    peer.fit(1, seed, f"{peer.folder}/first.speed")
    started = time.perf_counter()
    trained, _ = peer.fit(EPOCHS_WITH_KILL, seed, f"{peer.folder}/undisturbed.even")
    even_s, even_loss = time.perf_counter() - started, peer.loss(trained)
    started = time.perf_counter()
    marker, outcome, loss = f"{peer.folder}/{way}.kill", "trained", 0.0
    try:
        trained, _ = peer.fit(EPOCHS_WITH_KILL, seed, marker)
        loss = peer.loss(trained)
    except Exception as error:
        outcome = type(error).__name__
    seconds = time.perf_counter() - started
    epochs = []
    with contextlib.suppress(FileNotFoundError), open(f"{peer.folder}/{way}.epochs") as file:
        epochs = [int(line) for line in file]
    return {"even_s": even_s, "even_loss": even_loss, "kill_s": seconds, "loss": loss,
            "outcome": outcome, "epochs": len(epochs)}  # fmt: skip


def training_workers(least_bytes: int = 250 << 20) -> list[int]:
    """Spark's Python workers that have a framework in their memory, the youngest last."""
    import psutil

    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            forked = parent is not None and "pyspark.daemon" in " ".join(parent.cmdline())
            if forked and process.memory_info().rss >= least_bytes:
                found.append(process)
    return [p.pid for p in sorted(found, key=lambda process: process.create_time())]
