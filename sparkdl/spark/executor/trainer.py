"""The task of ``fit``: trains one partition to the end of the fit."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa

from sparkdl.config import LoopSettings, UseGpu
from sparkdl.data import Batches, DataSpec, Partition, read_partition
from sparkdl.data.rows import label_mean, off_center
from sparkdl.errors import Cause, WorkerError
from sparkdl.failures import Failure, RanksLost
from sparkdl.files.run_state import RunState
from sparkdl.launch.devices import DeviceRequest, start_framework
from sparkdl.launch.task import RankContext, Result, failed, of_kind
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.process.host_load import TRAINING_DESCRIPTORS, require_descriptors
from sparkdl.process.log_lines import boxed_lines
from sparkdl.spark.forms.files import FileInput
from sparkdl.spark.forms.wire import named_batches
from sparkdl.training.phases import PhaseClock, Spans, Usage, current_clock, recording
from sparkdl.training.reports import EpochReport, MetricState
from sparkdl.training.syncing import RankIdentity, Strategy

Key = tuple[str, int]
"""The name of the rows, and the memory budget: rows beyond it are shuffled in another way."""
_kept: tuple[Key, Partition] | None = None


def read_or_kept(key: Key | None, read: Callable[[], Partition]) -> Partition:
    """The partition that an earlier task has kept under the key, or a new one.

    A task that wants other rows frees those that are kept. Not thread-safe: a worker process runs
    one task at a time.

    Args:
        key: None for rows of one fit alone.
    """
    global _kept
    kept, _kept = _kept, None
    if kept is not None:
        if kept[0] == key:
            return kept[1]
        kept[1].close()
    return read()


@contextlib.contextmanager
def lent(key: Key | None, partition: Partition) -> Iterator[None]:
    """Leaving keeps the partition for the next task, if it is in memory and nothing was raised."""
    global _kept
    try:
        yield
    except BaseException:
        partition.close()
        raise
    if key is None or partition.is_spilled:
        partition.close()
    else:
        _kept = key, partition


_FIRST_ROWS_S = 1.0
"""Seconds that a task waits for its first rows before it imports the framework. Rows of a wrong
kind are then refused before the import."""


@dataclass(frozen=True)
class TrainTask:
    """Everything that a rank of ``fit`` needs; see :class:`sparkdl.launch.task.Task`.

    Args:
        files: What each rank reads from files by itself; None if the rows come from Spark.
        rows_key: Of rows that the next task may want, too; None for those of this fit alone.
    """

    archive: ModelArchive
    spec: DataSpec
    settings: LoopSettings
    strategy: Strategy
    num_workers: int
    use_gpu: UseGpu = "auto"
    files: FileInput | None = None
    rows_key: str | None = None

    @property
    def _key(self) -> Key | None:
        return None if self.rows_key is None else (self.rows_key, self.settings.memory_budget_bytes)

    @property
    def devices(self) -> DeviceRequest:
        return DeviceRequest(self.archive.backend, self.use_gpu)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Trains; the rows are read while the framework and the model come up."""
        require_descriptors(f"worker {rank.rank}", TRAINING_DESCRIPTORS)
        placement = self.devices.place(rank.resources)
        meeting = nullcontext(rank) if rank.gathering is None else self.strategy.meet(rank)
        # Leaving the pool waits for the reader: nobody else may read this task's input after it.
        with (
            recording(PhaseClock(keeps_spans=self.settings.keep_spans)),
            boxed_lines(),
            meeting as met,
            ThreadPoolExecutor(1, thread_name_prefix="sparkdl-read") as pool,
        ):
            begun = threading.Event()
            reader = pool.submit(self._read, self._rows(rank.rank, batches), begun)
            with current_clock().within("read"):
                begun.wait(_FIRST_ROWS_S)
            _raise_failure(reader)  # before the framework is up, which takes seconds
            start_framework(placement)
            _raise_failure(reader)
            from sparkdl.learner.cache import keras_settings

            with keras_settings(self.archive):
                trained = self._train(reader, rank, met, placement.gpus or ())
        yield from trained.batches()

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Tells the other workers of an exception that no other attempt mends, and returns it.

        What another attempt may mend is raised again, so that Spark makes one: a killed child
        process, a server that this host did not reach, memory that ran out. Of a barrier stage
        only a killed child is raised: Spark would drop what the other ranks return.
        """
        if isinstance(error, RanksLost):
            raise error
        failure = Failure.of(rank.rank, error)
        mendable = failure.cause is Cause.LOST or isinstance(error, MemoryError)
        if rank.gathering is None and mendable:
            raise error
        of_another = isinstance(error, WorkerError) and error.rank != rank.rank
        if not of_another and not (rank.gathering is not None and failure.secondary):
            rank.settle()
            self.strategy.report_failure(rank, error)
        yield from failed(rank.rank, failure).batches()

    def _rows(self, rank: int, batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """The rank's rows under their own names: from Spark, or from its files."""
        if self.files is None:
            return named_batches(batches, self.spec)
        return self.files.batches(rank, self.spec)

    def _read(
        self, batches: Generator[pa.RecordBatch], begun: threading.Event
    ) -> tuple[Partition, float]:
        began = time.perf_counter()
        settings = self.settings

        def noted() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield batch
                begun.set()

        try:
            partition = read_or_kept(
                self._key,
                lambda: read_partition(
                    noted(), self.spec, settings.memory_budget_bytes, settings.spill_dir
                ),
            )
            if settings.shuffle:
                partition.find_order()
            partition = partition.under(self.spec)
        finally:
            begun.set()
            batches.close()
        return partition, time.perf_counter() - began

    def _train(
        self,
        reader: Future[tuple[Partition, float]],
        rank: RankContext,
        met: RankIdentity,
        gpus: tuple[str, ...],
    ) -> TrainedRank:
        """Joins the run and trains the rows that ``reader`` reads; the framework is up."""
        from sparkdl.learner.cache import cached_learner, forget_learner, is_kept
        from sparkdl.worker import train

        settings, clock = self.settings, current_clock()
        weighted = "weighted by class" if settings.class_weight else ""
        form = f"{self.spec.form(self.archive.named)} {weighted}"
        if is_kept(self.archive, form):  # to set its state is quick, but would hold the reader up
            with clock.within("read"):
                wait([reader])
        learner = cached_learner(self.archive, form)
        learner.take_stream(rank.rank, rank.num_ranks)
        # The file is not needed while the model trains, and may be several times as large as it.
        self.archive.forget_content()
        try:
            with self.strategy.open(met, learner.layout) as synchronizer:
                with clock.within("read"):
                    partition, read_s = reader.result()
                with lent(self._key, partition):
                    if settings.check_data:
                        partition.check_finite()
                    source = Batches(
                        partition.train, settings.batch_size, shuffle=settings.shuffle,
                        seed=settings.seed, rank=rank.rank,
                        steps=settings.steps_of(len(partition.train)),
                        repeat=True, class_weight=settings.class_weight,
                        by_content=settings.shuffle, prepare=learner.prepare,
                    )  # fmt: skip
                    held_out = None
                    if self.spec.role_column is not None:
                        held_out = Batches(
                            partition.validation, settings.batch_size, shuffle=False,
                            steps=settings.held_out_steps, by_content=settings.shuffle,
                            prepare=learner.prepare,
                        )  # fmt: skip
                    rows = source.num_rows
                    labels = () if settings.class_weight else label_mean(partition.train)
                    center = off_center(partition.train)
                    seconds = train(
                        learner, synchronizer, source, settings, validation=held_out,
                        num_rows=rows, num_workers=rank.num_ranks,
                    )  # fmt: skip
                outcome = synchronizer.outcome(learner, settings.epochs)
        except BaseException:
            forget_learner(self.archive, form)
            raise
        return TrainedRank(
            rank=rank.rank, rows=rows, transport=outcome.transport, seconds=seconds, read_s=read_s,
            gpus=gpus, pid=os.getpid(), refused=outcome.refused, counted=outcome.counted,
            label_mean=labels, off_center=center, unreported=dict(outcome.unreported),
            state=outcome.state, usage=clock.usage(), spans=clock.spans(),
        )  # fmt: skip


def _raise_failure(reader: Future[tuple[Partition, float]]) -> None:
    """Raises what the reader raised, if it has ended."""
    if reader.done():
        reader.result()


@dataclass(frozen=True)
class TrainedRank:
    """The result of a rank of ``fit``.

    Args:
        rows: Rows that it trained per epoch.
        seconds: From its first step to its last.
        unreported: Epoch -> its final report; empty where the rank sent it to the driver.
        refused: Updates that were refused because they were not finite.
        usage: What its time went into.
        spans: Its phases one after another, where the driver wants them.
        counted: The part of its changes that counted, a mean over its exchanges.
        label_mean: See :func:`sparkdl.data.rows.label_mean`; empty with class weights.
        off_center: See :func:`sparkdl.data.rows.off_center`.
    """

    rank: int
    rows: int
    transport: str
    seconds: float
    read_s: float
    gpus: tuple[str, ...]
    pid: int
    unreported: dict[int, EpochReport] = field(default_factory=dict)
    state: RunState | None = field(default=None, repr=False)
    refused: int = 0
    usage: Usage = field(default_factory=lambda: Usage({}))
    spans: Spans | None = field(default=None, repr=False)
    counted: float = 1.0
    label_mean: tuple[float, ...] = ()
    off_center: dict[str, float] = field(default_factory=dict)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The counterpart of :meth:`all_of`."""
        apart = ("state", "spans")
        plain = {name: value for name, value in vars(self).items() if name not in apart}
        plain["usage"] = asdict(self.usage)
        plain["unreported"] = [vars(report) for report in self.unreported.values()]
        yield from Result(self.rank, "done", json.dumps(plain, default=np.ndarray.tolist)).batches()
        if self.state is not None:
            yield from Result(self.rank, "state", "", self.state.to_bytes()).batches()
        if self.spans is not None:
            yield from Result(self.rank, "spans", "", self.spans.to_bytes()).batches()

    @classmethod
    def all_of(cls, results: list[Result]) -> dict[int, TrainedRank]:
        """Rank -> what it returned, in rank order."""
        states, spans = of_kind(results, "state"), of_kind(results, "spans")
        trained = {}
        for rank, result in of_kind(results, "done").items():
            told = json.loads(result.text)
            told["gpus"], told["usage"] = tuple(told["gpus"]), Usage(**told["usage"])
            told["label_mean"] = tuple(told["label_mean"])
            reports = [EpochReport(**{**r, **_arrays(r)}) for r in told["unreported"]]
            told["unreported"] = {report.epoch: report for report in reports}
            state = RunState.from_bytes(states[rank].content) if rank in states else None
            kept = Spans.from_bytes(spans[rank].content) if rank in spans else None
            trained[rank] = cls(**told, state=state, spans=kept)
        return trained


def _arrays(report: dict[str, list[float]]) -> dict[str, MetricState]:
    return {name: np.array(report[name], np.float64) for name in ("metrics", "val_metrics")}
