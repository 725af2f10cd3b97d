"""``TensorBoard``: a fit's events as TensorBoard's event files, without TensorFlow.

An event file has a protocol buffer ``Event`` in each frame (:mod:`sparkdl.data.tfrecord.framing`):
``Event{1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary}`` with
``Summary{1: Value{1: string tag, 2: float simple_value}}``.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

from sparkdl.data.tfrecord.framing import frame, varint
from sparkdl.progress import events
from sparkdl.tracking.event_files import GrowingFile
from sparkdl.tracking.sinks import Thinning
from sparkdl.training.phases import PHASES

_DOUBLE, _VARINT, _BYTES, _FLOAT = 1, 0, 2, 5
_counter = itertools.count()


class TensorBoard:
    """A sink that writes what ``tensorboard --logdir LOG_DIR`` shows.

    The curves have Keras' names: ``epoch_loss`` and other metrics per epoch in the runs ``train``
    and ``validation``, ``batch_loss`` over the batches of all workers. Beside them ``rows_per_s``
    and ``staleness``, and a run per worker with its rows per second, its memory, and the share of
    its time that went into each phase. A search (``tune.search``) has a run ``trial_N`` for each
    trial, with its metrics per epoch.

    Args:
        log_dir: A folder: a local path, or a URI of any file system.
        clock: Seconds since 1970.
    """

    wants_progress = True

    def __init__(self, log_dir: str, *, clock: Callable[[], float] = time.time) -> None:
        self._log_dir, self._clock = str(log_dir).rstrip("/"), clock
        self._writers: dict[str, _EventFile] = {}
        self._began, self._workers_due = 0.0, Thinning()
        self._before: dict[int, tuple[float, events.WorkerView]] = {}

    def handle(self, event: events.Event) -> None:
        """Writes the event's numbers."""
        match event:
            case events.TrainingBegan():
                self._close()
                self._before, self._workers_due = {}, Thinning()
                self._writer("train").flush()
            case events.EpochProgressed():
                step = event.epoch * event.batches_per_epoch + event.batches
                self._write("train", step, numbers_of("batch_", event.metrics))
            case events.WorkersProgressed():
                now = self._clock()
                if self._workers_due.due(now):
                    for worker in event.workers:
                        self._write_worker(now, worker)
            case events.EpochEnded():
                self._write_epoch(event)
            case events.TrialEpochEnded():
                numbers = numbers_of("epoch_", event.metrics)
                self._write(f"trial_{event.trial}", event.epoch, numbers)
            case events.TrialEnded():  # one that goes on gets another file, which TensorBoard joins
                writer = self._writers.pop(f"trial_{event.trial}", None)
                if writer is not None:
                    writer.close()
            case events.TrainingEnded() | events.TrainingFailed():
                self._close()
            case events.SearchBegan() | events.SearchEnded():
                self._close()
            case _:
                pass

    def _write_epoch(self, event: events.EpochEnded) -> None:
        held_out = {n[4:]: v for n, v in event.metrics.items() if n.startswith("val_")}
        trained = {n: v for n, v in event.metrics.items() if not n.startswith("val_")}
        beside = {"staleness": event.staleness}
        if event.rows_per_s is not None:
            beside["rows_per_s"] = event.rows_per_s
        self._write("train", event.epoch, [*numbers_of("epoch_", trained), *beside.items()])
        if held_out:
            self._write("validation", event.epoch, numbers_of("epoch_", held_out))
        for writer in self._writers.values():
            writer.flush(whole=True)

    def _write_worker(self, now: float, worker: events.WorkerView) -> None:
        before = self._before.get(worker.rank)
        self._before[worker.rank] = now, worker
        if before is None or now <= before[0] or worker.usage is None:
            return
        numbers = {
            "worker_rows_per_s": max(0, worker.rows - before[1].rows) / (now - before[0]),
            "worker_memory_mb": worker.usage.memory_bytes / 1e6,
            "worker_staleness": worker.staleness,
        }
        earlier = before[1].usage
        if earlier is not None and worker.usage.total_s > earlier.total_s:
            total = worker.usage.total_s - earlier.total_s
            for phase in PHASES:
                seconds = worker.usage.seconds[phase] - earlier.seconds[phase]
                numbers[f"worker_share/{phase}"] = seconds / total
        step = worker.epoch * worker.batches_per_epoch + worker.batch
        self._write(f"worker_{worker.rank}", step, list(numbers.items()))

    def _write(self, run: str, step: int, numbers: list[tuple[str, float]]) -> None:
        writer = self._writer(run)
        writer.write(self._clock(), step, numbers)
        writer.flush()

    def _writer(self, run: str) -> _EventFile:
        if run not in self._writers:
            self._writers[run] = _EventFile(f"{self._log_dir}/{run}", self._clock())
        return self._writers[run]

    def _close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()


class _EventFile(GrowingFile):
    """One event file in a folder of its own run."""

    def __init__(self, folder: str, now: float) -> None:
        host = socket.gethostname() or "localhost"
        name = f"events.out.tfevents.{int(now)}.{host}.{os.getpid()}.{next(_counter):06d}.v2"
        super().__init__(f"{folder}/{name}")
        self.append(frame(_double(1, now) + _bytes(3, b"brain.Event:2")))

    def write(self, now: float, step: int, numbers: list[tuple[str, float]]) -> None:
        values = (_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in numbers)
        summary, number = b"".join(values), _key(2, _VARINT) + varint(step)
        self.append(frame(_double(1, now) + number + _bytes(5, summary)))


def numbers_of(prefix: str, metrics: events.Metrics) -> list[tuple[str, float]]:
    """Tag -> number; a metric with several values has a tag for each.

    >>> numbers_of('epoch_', {'loss': 0.5, 'f1': [0.25, 1.0]})
    [('epoch_loss', 0.5), ('epoch_f1/0', 0.25), ('epoch_f1/1', 1.0)]
    """

    def flat(tag: str, value: events.MetricValue) -> Iterator[tuple[str, float]]:
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from flat(f"{tag}/{index}", item)
        else:
            yield tag, float(value)

    return [pair for name, value in metrics.items() for pair in flat(prefix + name, value)]


def _key(field: int, kind: int) -> bytes:
    return bytes([field << 3 | kind])


def _double(field: int, value: float) -> bytes:
    return _key(field, _DOUBLE) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond float32
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _key(field, _FLOAT) + packed


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + varint(len(value)) + value
