"""A training task in a fresh process, for a reused Python worker that runs on other devices.

A framework keeps the devices that it saw first, for the life of its process. The parent passes
the partition through an unnamed Arrow file and the task over the line between them; in a barrier
stage it also exchanges the child's texts with the other ranks. The child talks to the server and
to the other ranks itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import pyarrow as pa

from sparkdl.errors import WorkerError
from sparkdl.launch.child_process import ChildProcess, ParentLine
from sparkdl.launch.devices import Placement
from sparkdl.launch.results import Result
from sparkdl.spark.executor.trainer import Identity, give_up, train_here

_TAIL_BYTES = 4000


class ChildLost(RuntimeError):
    """A task's child was killed: Spark does what it does when a Python worker is."""


def train_in_child(
    batches: Iterator[pa.RecordBatch], pickled: bytes, identity: Identity, placement: Placement
) -> list[Result]:
    """Runs :func:`sparkdl.spark.executor.trainer.train_here` in a child process.

    Raises:
        ChildLost: The child was killed.
        WorkerError: The child ended without an answer; with the end of its output.
        TransportError: The child lost the server: another try may do.
    """
    # Files without a name, so that nothing is left if this process is killed.
    with tempfile.TemporaryFile() as partition, tempfile.TemporaryFile() as output:
        _write(batches, partition)
        gathering = identity.gathering
        alone = replace(identity, gathering=None)
        setup = partition.fileno(), alone, gathering is not None, placement, pickled
        child = ChildProcess(
            "sparkdl.launch.train_child", identity.rank, setup,
            output=output, pass_fds=[partition.fileno()],
        )  # fmt: skip
        try:
            while (message := child.receive()) is not None:
                kind, content = message
                if kind == "gather" and gathering is not None:
                    child.answer(gathering.all_gather(*content))
                elif kind == "lost":
                    raise content
                else:
                    results: list[Result] = content
                    return results
            status = child.status()
        finally:
            child.close(grace_s=5.0)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = output.read().decode(errors="replace")
    if child.process.returncode < 0:
        raise ChildLost(f"the child process of rank {identity.rank} {status}\n{tail}")
    raise WorkerError(identity.rank, f"its child process {status}", tail)


def _write(batches: Iterator[pa.RecordBatch], file: IO[bytes]) -> None:
    writer = None
    for batch in batches:
        if writer is None:
            writer = pa.ipc.new_file(file, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()
    file.flush()


def _read(descriptor: int) -> Iterator[pa.RecordBatch]:
    if not os.fstat(descriptor).st_size:
        return
    with pa.memory_map(f"/dev/fd/{descriptor}") as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def main() -> None:
    """The child: everything from the parent, results to the parent."""
    import cloudpickle

    line = ParentLine()
    partition, identity, barrier, placement, pickled = line.setup
    if barrier:
        identity = replace(identity, gathering=line.gathering(identity.rank))
    task: Any = cloudpickle.loads(pickled)["task"]
    try:
        try:
            results = train_here(_read(partition), task, identity, placement)
        except Exception as error:
            results = [give_up(task, identity, error)]
    except Exception as error:  # what Spark's next try may mend
        line.tell("lost", error)
    else:
        line.tell("done", results)
    line.close()


if __name__ == "__main__":
    # as a module of its proper name, so that what is unpickled is what is defined here
    from sparkdl.launch.train_child import main as _main

    _main()
