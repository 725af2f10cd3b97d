"""Sinks that write files: ``JsonLines``, ``Timeline`` for Perfetto, and ``TensorBoard``.

A file of TensorBoard has a protocol buffer ``Event`` in each frame
(:mod:`sparkdl.data.tfrecord.framing`):
``Event{1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary}`` with
``Summary{1: Value{1: string tag, 2: float simple_value}}``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from sparkdl.data.tfrecord.framing import frame, varint
from sparkdl.files.storage import check_writable, create_local, require_plain, write_bytes
from sparkdl.process.closing import Closing
from sparkdl.progress import events
from sparkdl.tracking.sinks import Thinning
from sparkdl.training.phases import PHASES, Phase, Spans

ENDING = ".jsonl"


class JsonLines:
    """A sink that writes ``FOLDER/RUN.jsonl`` for each fit or search: what
    :func:`sparkdl.dashboard` shows of past runs, and what pandas reads with
    ``read_json(path, lines=True)``.

    Each line has ``time`` (seconds since 1970), ``event`` and the event's fields
    (:mod:`sparkdl.progress.events`). Of what comes several times a second some is left out, more in
    a longer fit, so that the file of a day stays readable.

    Args:
        folder: A local path, or a URI of any file system.
        clock: Seconds since 1970.
    """

    wants_progress = True

    def __init__(self, folder: str, *, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = str(folder), clock
        self._file: GrowingFile | None = None
        self._thinned: dict[type[events.Event], Thinning] = {}

    def handle(self, event: events.Event) -> None:
        now = self._clock()
        if isinstance(event, events.TrainingBegan):
            many = max(1.0, event.run.num_workers / 8)  # a line about workers has all of them
            self._thinned = {
                events.EpochProgressed: Thinning(),
                events.WorkersProgressed: Thinning(most=500 / many),
            }
            self._open(event.run.run_id)
        elif isinstance(event, events.SearchBegan):
            self._open(event.search_id)
        if self._file is None:
            return
        thinning = self._thinned.get(type(event))
        if thinning is not None and not thinning.due(now):
            return
        line = json.dumps({"time": round(now, 3), **events.as_json(event)}, separators=(",", ":"))
        self._file.append(line.encode() + b"\n")
        often = thinning is not None or isinstance(
            event, (events.TrialBegan, events.TrialEpochEnded, events.LinesLogged)
        )
        self._file.flush(whole=not often)
        if isinstance(event, (events.TrainingEnded, events.TrainingFailed, events.SearchEnded)):
            self._file.close()
            self._file = None

    def _open(self, run_id: str) -> None:
        self._file = GrowingFile(f"{self._folder.rstrip('/')}/{run_id}{ENDING}")


NAMES: dict[Phase, str] = {
    "start": "START", "read": "READ", "compute": "STEP", "evaluate": "EVALUATE",
    "exchange": "PUSH_PULL", "wait": "WAIT",
}  # fmt: skip
"""Phase -> its name in the timeline; an exchange without a server has Horovod's: ``ALLREDUCE``."""
_DRIVER = 1_000_000


class Timeline:
    """A sink that writes one JSON file of trace events when the fit ends.

    Each rank is a process of the timeline whose phases follow one another without a gap (``START``,
    ``READ``, ``STEP``, ``PUSH_PULL`` or ``ALLREDUCE``, ``EVALUATE``, ``WAIT``); the driver is one
    more, with what it did before the first (``PREPARE``), the epochs, and what came after the last
    (``FINISH``). Ranks are placed by the clocks of their hosts. Of a fit that fails there
    are the driver's epochs alone: ranks return their phases when they end.

    Args:
        path: A local path, or a URI of any file system.
        clock: Seconds since 1970.
        began_at: When the fit was called, by that clock; None for when training begins.
    """

    wants_progress = False
    wants_spans = True

    def __init__(
        self, path: str, *, clock: Callable[[], float] = time.time, began_at: float | None = None
    ) -> None:
        self._path, self._clock, self._began_at = str(path), clock, began_at
        self._exchange = NAMES["exchange"]
        self._spans: dict[int, list[Spans]] = {}  # of each stage of the fit
        self._driver: list[tuple[str, float, float]] = []
        self._since = 0.0

    def handle(self, event: events.Event) -> None:
        """Takes note; writes the file at the end."""
        match event:
            case events.TrainingBegan():
                require_plain(self._path)
                check_writable(self._path)
                without_server = event.run.parameters.get("mode") == "allreduce"
                self._exchange = "ALLREDUCE" if without_server else NAMES["exchange"]
                self._spans, self._driver, self._since = {}, [], self._began_at or 0.0
            case events.EpochBegan():
                if not self._driver and self._since:
                    self._did("PREPARE")
                self._since = self._clock()
            case events.EpochEnded():
                self._did(f"EPOCH {event.epoch + 1}")
            case events.WorkerTraced():
                self._spans.setdefault(event.rank, []).append(event.spans)
            case events.TrainingEnded() | events.TrainingFailed():
                if self._driver:
                    self._did("FINISH")
                write_bytes(self._path, json.dumps(self._trace()).encode())

    def _did(self, name: str) -> None:
        now = self._clock()
        self._driver.append((name, self._since, now))
        self._since = now

    def _trace(self) -> dict[str, events.Json]:
        began = [spans.began_at for stages in self._spans.values() for spans in stages]
        zero = min([*began, *(start for _, start, _ in self._driver)], default=0.0)
        traced: list[events.Json] = [*_process(_DRIVER, "driver", -1)]
        for name, start, end in self._driver:
            traced.append(_span(name, _DRIVER, start - zero, end - start))
        names = NAMES | {"exchange": self._exchange}
        for rank, stages in sorted(self._spans.items()):
            traced += _process(rank, f"rank {rank}", rank)
            traced += (
                _span(names[phase], rank, spans.began_at - zero + start, seconds)
                for spans in stages
                for phase, start, seconds in spans
            )
        return {"traceEvents": traced, "displayTimeUnit": "ms"}


def _span(name: str, process: int, start_s: float, seconds: float) -> events.Json:
    return {
        "ph": "X", "name": name, "cat": "sparkdl", "pid": process, "tid": 0,
        "ts": round(start_s * 1e6, 3), "dur": round(seconds * 1e6, 3),
    }  # fmt: skip


def _process(process: int, name: str, place: int) -> list[events.Json]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}},
        {
            "ph": "M", "name": "process_sort_index", "pid": process, "tid": 0,
            "args": {"sort_index": place},
        },
    ]  # fmt: skip


class GrowingFile(Closing):
    """Appends to a new file.

    A local file has what was appended after each :meth:`flush`. Object stores cannot append: there
    the content is kept in memory, and the file written anew, whole, with each ``flush(whole=True)``
    and at the end.

    Args:
        path: A path or URI; the folders above it are made.

    Raises:
        ResourceError: The file is there already, or cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = create_local(path)
        self._content = bytearray()
        self._closed = False
        if self._file is None:
            write_bytes(path, b"")

    def append(self, content: bytes) -> None:
        """Adds to the end."""
        if self._file is None:
            self._content += content
        else:
            self._file.write(content)

    def flush(self, *, whole: bool = False) -> None:
        """Makes what was appended readable: in an object store only with ``whole``, which costs the
        time to write all of it."""
        if self._file is not None:
            self._file.flush()
        elif whole:
            write_bytes(self._path, bytes(self._content))

    def close(self) -> None:
        """Makes all readable."""
        if self._closed:
            return
        self._closed = True
        self.flush(whole=True)
        if self._file is not None:
            self._file.close()


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
                if (writer := self._writers.pop(f"trial_{event.trial}", None)) is not None:
                    writer.close()
            case events.TrainingEnded() | events.TrainingFailed():
                self._close()
            case events.SearchBegan() | events.SearchEnded():
                self._close()

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
