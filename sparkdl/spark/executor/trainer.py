"""Trains one partition in this process: rows, framework, model, loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from sparkdl.collective.control import NoControl
from sparkdl.config import LoopSettings, UseGpu
from sparkdl.data import Batches, DataSpec, Partition, read_partition
from sparkdl.errors import TransportError, WaitTimeoutError, WorkerError
from sparkdl.launch.devices import Placement, start_framework, started_on
from sparkdl.launch.gathering import TAKEN_ALONG_S, Gathering, taken_along
from sparkdl.launch.results import CHUNK_BYTES, Result, describe_error, failure_result
from sparkdl.learner.archive import ModelArchive
from sparkdl.spark.columns.wire import named_batches

GATHER_TIMEOUT_S = 300.0
"""Wait for the other ranks of a barrier stage to come up."""


@dataclass(frozen=True)
class Identity:
    """Which worker a task is: its rank, and which try at it.

    Args:
        rank: From 0.
        attempt: A number that no other try has.
        num_workers: Ranks in all.
        gathering: Of a barrier stage, else None.
    """

    rank: int
    attempt: int
    num_workers: int
    gathering: Gathering | None = None

    def all_gather(self, text: str) -> list[str]:
        """Every rank's text in rank order, in a barrier stage."""
        assert self.gathering is not None
        return self.gathering.all_gather(text, GATHER_TIMEOUT_S)


class Strategy(Protocol):
    """The picklable recipe of how updates travel, made on the driver."""

    def meet(self, identity: Identity) -> Any:
        """Barrier stages: begins to meet the others; a context manager of what ``open`` takes."""

    def open(self, identity: Any, layout: Any) -> Any:
        """The live synchronizer of a worker, as a context manager."""

    def report_failure(self, identity: Identity, error: BaseException) -> None:
        """Ends the run for all workers."""


@dataclass(frozen=True)
class TrainTask:
    """Everything that a training task needs; broadcast once."""

    archive: ModelArchive
    spec: DataSpec
    settings: LoopSettings
    strategy: Strategy
    num_workers: int
    use_gpu: UseGpu = "auto"
    validate: bool = False


def give_up(task: TrainTask, identity: Identity, error: Exception) -> Result:
    """Tells the other workers of an exception that no retry mends; raises any other again.

    A rank of a barrier stage never raises: Spark would drop what the others say.
    """
    if identity.gathering is not None and taken_along(error):
        time.sleep(TAKEN_ALONG_S)  # the cause is heard first
        described = {**describe_error(error), "lost": True}
        return Result(identity.rank, "failed", json.dumps(described))
    lost = isinstance(error, TransportError) and not isinstance(error, WaitTimeoutError)
    lost = lost and identity.gathering is None
    if lost or (isinstance(error, MemoryError) and identity.gathering is None):
        raise error
    if not (isinstance(error, WorkerError) and error.rank != identity.rank):
        task.strategy.report_failure(identity, error)
    return failure_result(identity.rank, error)


def train_here(
    batches: Iterator[pa.RecordBatch], task: TrainTask, identity: Identity, placement: Placement
) -> list[Result]:
    """Trains in this process; the rows are read while the framework and the model come up."""

    def read() -> tuple[Partition, float]:
        began = time.perf_counter()
        partition = read_partition(
            named_batches(batches, task.spec), task.spec, task.settings.memory_budget_bytes,
            task.settings.spill_dir,
        )  # fmt: skip
        return partition, time.perf_counter() - began

    meeting = nullcontext(identity) if identity.gathering is None else task.strategy.meet(identity)
    # Leaving the pool waits for the reader: nobody else may read this task's input after it.
    with (
        meeting as met,
        ThreadPoolExecutor(1, thread_name_prefix="sparkdl-read") as pool,
    ):
        reader = pool.submit(read)
        start_framework(placement)
        return train_partition(reader, task, identity, met)


def train_partition(
    reader: Future[tuple[Partition, float]], task: TrainTask, identity: Identity, met: Any
) -> list[Result]:
    """Joins the run and trains the rows that ``reader`` reads; the framework is up."""
    from sparkdl.learner.cache import cached_learner, forget_learner, is_kept
    from sparkdl.worker import train

    settings = task.settings
    if is_kept(task.archive):  # to set its state is quick, but would hold the reading thread up
        wait([reader])
    learner = cached_learner(task.archive)
    try:
        with task.strategy.open(met, learner.layout) as synchronizer:
            partition, read_s = reader.result()
            with partition:
                if settings.check_data:
                    partition.check_finite()
                source = Batches(
                    partition.train, settings.batch_size, shuffle=settings.shuffle,
                    seed=settings.seed, rank=identity.rank,
                )  # fmt: skip
                held_out = None
                if task.validate:
                    held_out = Batches(partition.validation, settings.batch_size, shuffle=False)
                seconds = train(
                    learner, synchronizer, source, settings, validation=held_out,
                    num_rows=len(partition.train), num_workers=identity.num_workers,
                )  # fmt: skip
            transport = synchronizer.transport
    except BaseException:
        forget_learner(task.archive)
        raise
    summary = json.dumps(
        {
            "rows": len(partition.train),
            "transport": transport,
            "seconds": seconds,
            "read_s": read_s,
            "gpus": list(started_on().gpus),
            "pid": os.getpid(),
        }
    )
    results = [Result(identity.rank, "done", summary)]
    control = getattr(synchronizer, "control", None)
    if isinstance(control, NoControl):  # what the driver could not hear while it ran
        results.append(Result(identity.rank, "epochs", json.dumps(control.epochs)))
    alone = getattr(getattr(task.strategy, "rule", None), "independent", False)
    if alone or (synchronizer.keeps_state and identity.gathering is not None):
        # no server has these weights
        weights = np.empty(learner.layout.size, np.float32)
        learner.read_weights(weights)
        results += _chunks(identity.rank, "weights", weights.tobytes())
    if synchronizer.keeps_state:
        learner.sync_model()
        results += _chunks(identity.rank, "optimizer", learner.optimizer_state())
        results += _chunks(identity.rank, "rule", getattr(synchronizer, "rule_state", b""))
    return results


def _chunks(rank: int, kind: str, content: bytes) -> list[Result]:
    return [
        Result(rank, kind, "", content[i : i + CHUNK_BYTES])
        for i in range(0, len(content), CHUNK_BYTES)
    ]
