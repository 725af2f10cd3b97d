"""A Python worker of the parity tests: runs one pickled task after another, each as a rank.

It is to a rank what Spark's Python worker is: a process of its own that outlives the task. Its main
thread runs the task, which has the rows as Arrow batches and returns Arrow batches.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from multiprocessing.connection import Client, Connection
from typing import Any

import pyarrow as pa
from start.graph_rewriting import rewrite_graphs

from sparkdl.errors import SparkDLError
from sparkdl.launch.child import run_rank
from sparkdl.launch.task import AloneGathering, RankContext


def serve(driver: Connection) -> None:
    """Runs what the driver sends until it closes the connection."""
    while True:
        try:
            content, rank, attempt, num_ranks, barrier, rows = driver.recv()
        except EOFError:
            return
        try:
            driver.send(_run(content, rank, attempt, num_ranks, barrier, rows))
        except BaseException as error:
            driver.send(_described(error))


def _run(
    content: bytes, rank: int, attempt: int, num_ranks: int, barrier: bool, rows: bytes
) -> tuple[str, Any]:
    gathering = AloneGathering() if barrier else None
    context = RankContext(rank, attempt, num_ranks, gathering=gathering)
    with pa.ipc.open_stream(rows) as given:
        returned = list(run_rank(content, context, iter(given), print))
    return "done", [batch.to_pylist() for batch in returned]


def _described(error: BaseException) -> tuple[str, Any]:
    if isinstance(error, SparkDLError):
        return "raised", error
    return "raised", RuntimeError(f"{type(error).__name__}: {error}")


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    if os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow":
        rewrite_graphs(False)
    gc.collect()
    gc.freeze()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with Client(sys.argv[1], authkey=bytes.fromhex(os.environ.pop("PARITY_KEY"))) as driver:
        serve(driver)


if __name__ == "__main__":
    main()
