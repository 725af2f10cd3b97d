"""A training task in a fresh process, for a reused Python worker that runs on other devices.

A framework keeps the devices that it saw first, for the life of its process. The parent passes
the partition through an Arrow file and the task through the child's stdin; the child talks to the
server itself and dies with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from sparkdl.errors import WorkerError
from sparkdl.spark.resources import Placement
from sparkdl.spark.results import Result
from sparkdl.spark.trainer import Identity, give_up, train_here

_LENGTH = struct.Struct("<Q")


def train_in_child(
    batches: Iterator[pa.RecordBatch], pickled: bytes, identity: Identity, placement: Placement
) -> list[Result]:
    """Runs :func:`sparkdl.spark.trainer.train_here` in a child process and returns its results.

    Raises:
        WorkerError: The child died without an answer; with the end of its error output.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        path = os.path.join(folder, "partition.arrow")
        _write(batches, path)
        setup = cloudpickle.dumps((path, identity, placement, os.getpid()))
        process = subprocess.Popen(
            [sys.executable, "-m", "sparkdl.spark.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        try:
            message = b"".join(_LENGTH.pack(len(p)) + p for p in (setup, pickled))
            output, errors = process.communicate(message)
        except BaseException:
            process.kill()
            process.wait()
            raise
    marker = output.rfind(_MARK)
    if marker < 0:
        raise WorkerError(
            identity.rank,
            f"its child process ended with status {process.returncode}",
            errors.decode(errors="replace")[-4000:],
        )
    results: list[Result] = cloudpickle.loads(output[marker + len(_MARK) :])
    return results


_MARK = b"\n--sparkdl-result--\n"


def _write(batches: Iterator[pa.RecordBatch], path: str) -> None:
    writer = None
    for batch in batches:
        if writer is None:
            writer = pa.ipc.new_file(path, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


def _read(path: str) -> Iterator[pa.RecordBatch]:
    if not os.path.exists(path):
        return
    with pa.memory_map(path) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def _die_with(parent: int) -> None:
    """Ends this process when the parent does, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        import time

        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _next_part() -> bytes:
    (size,) = _LENGTH.unpack(sys.stdin.buffer.read(_LENGTH.size))
    return sys.stdin.buffer.read(size)


def main() -> None:
    """The child: everything from stdin, results to stdout."""
    import cloudpickle

    path, identity, placement, parent = cloudpickle.loads(_next_part())
    pickled = _next_part()
    _die_with(parent)
    task: Any = cloudpickle.loads(pickled)["task"]
    results: list[Result]
    try:
        results = train_here(_read(path), task, identity, placement)
    except Exception as error:
        results = [give_up(task, identity, error)]
    sys.stdout.flush()
    sys.stdout.buffer.write(_MARK + cloudpickle.dumps(results))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    # as a module of its proper name, so that what is unpickled is what is defined here
    from sparkdl.spark.child import main as _main

    _main()
