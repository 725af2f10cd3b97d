"""The runs that the page shows, bounded in memory, and who listens to them."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from sparkdl.errors import ResourceError
from sparkdl.files.storage import exists, read_start, sizes_of_files
from sparkdl.process.closing import Closing
from sparkdl.progress.events import Event, Json, SearchBegan, TrainingBegan, as_json
from sparkdl.tracking.event_files import ENDING
from sparkdl.training.phases import PHASES

Record = dict[str, Json]
WORKER_FIELDS = (
    "rank", "state", "retries", "host", "epoch", "batch", "batches_per_epoch", "rows", "staleness",
    "cpu_s", "memory_bytes", *PHASES,
)  # fmt: skip
"""What the numbers of a worker are, in this order."""
SERVER_FIELDS = (
    "host", "bytes_received", "bytes_sent", "memory_bytes", "table_rows", "staleness", "busy",
)  # fmt: skip
"""The numbers of a server, in this order."""
MOST_LINES = 400
"""Log lines that the page shows; the latest."""
_OF_A_SEARCH = {
    "search_began": ("search", ("metric", "maximize", "parameters")),
    "trial_began": ("trial", ("trial", "params", "begin", "end")),
    "trial_epoch_ended": ("point", ("trial", "epoch", "metrics")),
    "trial_ended": ("rung", ("trial", "epochs", "state", "metrics", "error", "importances")),
}
"""Events of a search -> the kind of their record, and what it has of the event."""


def record_of(event: dict[str, Any], time_s: float) -> Record | None:
    """The record that the page keeps of an event; None for an event that it does not need.

    Args:
        event: By :func:`sparkdl.progress.events.as_json`, or a line of an event file.
    """
    kind = event.get("event")
    time_s = round(time_s, 2)
    if kind == "training_began":
        run = event["run"]
        return {
            "kind": "begin", "t": time_s, "first_epoch": event["first_epoch"],
            "epochs": event["epochs"], "model": run["model"], "workers": run["num_workers"],
            "parameters": run["parameters"],
        }  # fmt: skip
    if kind in ("epoch_progressed", "epoch_ended"):
        return {
            "kind": "step" if kind == "epoch_progressed" else "epoch", "t": time_s,
            "epoch": event["epoch"], "batches": event["batches"],
            "of": event["batches_per_epoch"], "metrics": event["metrics"],
            "rows_per_s": event["rows_per_s"], "staleness": event["staleness"],
        }  # fmt: skip
    if kind == "workers_progressed":
        return {
            "kind": "workers", "t": time_s, "in": event["bytes_in"], "out": event["bytes_out"],
            "workers": [_worker(worker) for worker in event["workers"]], "hosts": _hosts(event),
            "servers": [
                [round(server[name], 2) if name == "staleness" else server[name]
                 for name in SERVER_FIELDS]
                for server in event.get("servers", ())
            ],
        }  # fmt: skip
    if kind == "lines_logged":
        return {"kind": "log", "t": time_s, "lines": event["lines"][-MOST_LINES:]}
    if kind in _OF_A_SEARCH:
        name, kept = _OF_A_SEARCH[kind]
        return {"kind": name, "t": time_s, **{field: event[field] for field in kept}}
    if kind == "training_ended":
        return {"kind": "end", "t": time_s, "stopped": event["stopped"]}
    if kind == "training_failed" or (kind == "search_ended" and event["error"]):
        return {"kind": "fail", "t": time_s, "error": event["error"]}
    if kind == "search_ended":
        ended = {"best": event["best"], "value": event["value"]}
        return {"kind": "end", "t": time_s, "stopped": False, **ended}
    return None


def _hosts(event: dict[str, Any]) -> Json:
    """``[host, processors, memory, [GPU, ...], [GPU memory, ...]]`` in percent, the driver first.

    Of several workers on a host the first says it: they see the same, and more than a driver
    there. Event files of earlier versions have none.
    """
    loads = {w["host"]: w.get("load") for w in reversed(event["workers"]) if w.get("load")}
    driver = event.get("driver_host", "")
    load = loads.pop(driver, None) or event.get("driver_load")
    told = [(f"{driver} (the driver's)" if driver else "the driver's host", load)]
    told += sorted(loads.items())
    return [
        [host, load["cpu_percent"], load["memory_percent"], load["gpu_percents"],
         load["gpu_memory_percents"]]
        for host, load in told
        if load
    ]  # fmt: skip


def _worker(worker: dict[str, Any]) -> Json:
    usage = worker["usage"] or {}
    seconds = usage.get("seconds", {})
    known: dict[str, Json] = {
        **worker, "staleness": round(worker["staleness"], 2), "cpu_s": usage.get("cpu_s", 0.0),
        "memory_bytes": usage.get("memory_bytes", 0),
        **{phase: round(seconds.get(phase, 0.0), 3) for phase in PHASES},
    }  # fmt: skip
    return [known[name] for name in WORKER_FIELDS]


MOST_RECORDS = 1200
"""Records of one kind that a run keeps; when there are more, every second one is left out."""
MOST_RUNS = 200
"""Runs that are kept, live and past: the newest."""
MOST_FILE_BYTES = 32 << 20
"""The bytes that are read of an event file: its beginning."""
MOST_LOG_CHARS = 1 << 20
"""Log lines of a run that are kept, as JSON; the latest."""
MOST_WAITING = 2000
"""Messages that a listener may be behind; one that is slower is ended, and comes back."""
MOST_POINTS = 20_000
"""Epochs of all trials of a search that are kept."""
_THINNED = ("step", "workers", "point")
_Text = tuple[int, str]
"""A record's number, and the record as JSON: a tenth of the memory of its objects."""


class RunRecords:
    """The records of one run as JSON, thinned: old ones are kept at growing distances."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._kept: dict[str, list[_Text]] = {}
        self._stride: dict[str, int] = {}
        self._count: dict[str, int] = {}
        self._told = self._trials = self._log_chars = 0
        self._newest: dict[str, _Text] = {}
        self.last: dict[str, Record] = {}

    def add(self, record: Record) -> str:
        """Takes in the newest record; returns it as JSON.

        Raises:
            ValueError: JSON has no such numbers: they are not finite. Nothing was taken in.
            RecursionError: It is too deep for JSON; nothing was taken in.
        """
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        kind = str(record["kind"])
        if kind == "trial" and isinstance(record["trial"], int):
            self._trials = max(self._trials, record["trial"] + 1)
        kept = self._kept.setdefault(kind, [])
        self.last[kind] = record
        entry = (self._told, text)
        self._told += 1
        self._newest[kind] = entry
        if kind not in _THINNED:
            kept.append(entry)
            if kind == "log":
                self._log_chars += len(text)
                while self._log_chars > MOST_LOG_CHARS and len(kept) > 1:
                    self._log_chars -= len(kept.pop(0)[1])
            return text
        number = self._count.get(kind, 0)
        self._count[kind] = number + 1
        stride = self._stride.setdefault(kind, 1)
        if number % stride == 0:
            kept.append(entry)
        if len(kept) > (MOST_POINTS if kind == "point" else MOST_RECORDS):
            del kept[1::2]
            self._stride[kind] = 2 * stride
        return text

    def to_json(self) -> str:
        """A list of the records in their order; of each kind the newest one is in it."""
        found = [entry for kept in self._kept.values() for entry in kept]
        found += [new for kind, new in self._newest.items() if self._kept[kind][-1] is not new]
        texts = [text for _, text in sorted(found, key=lambda entry: entry[0])]
        return f"[{','.join(texts)}]"

    @property
    def ended(self) -> bool:
        """Whether the run has ended, well or not."""
        return "end" in self.last or "fail" in self.last

    def summary(self) -> Record:
        """The run in a line: what a list of runs shows."""
        begin = self.last.get("begin") or self.last.get("search") or {}
        ended = self.last.get("end") or self.last.get("fail")
        epoch = self.last.get("epoch", {})
        states: dict[object, str] = {"end": "done", "fail": "failed"}
        return {
            "run": self.run_id,
            "state": "running" if ended is None else states[ended["kind"]],
            "began": begin.get("t"),
            "model": begin.get("model"),
            "epochs": begin.get("epochs"),
            "epoch": epoch.get("epoch"),
            "metrics": epoch.get("metrics"),
            "ended": None if ended is None else ended["t"],
            "metric": begin.get("metric"),
            "trials": self._trials,
        }


class RunBook:
    """All runs, live and past. Thread-safe."""

    def __init__(
        self, folder: str | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._clock = folder, clock
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._runs: dict[str, RunRecords] = {}
        self._listeners: list[BookListener] = []
        self._read: dict[str, int] = {}

    def sink(self) -> BookSink:
        """A sink that writes one fit into the book."""
        return BookSink(self.add, self._clock)

    def add(self, run_id: str, record: Record) -> None:
        """Takes in the newest record of a run and tells the listeners."""
        with self._lock:
            self._make_room(run_id)
            text = self._runs.setdefault(run_id, RunRecords(run_id)).add(record)
            message = f'{{"run":{json.dumps(run_id)},"record":{text}}}'
            self._listeners = [each for each in self._listeners if each.put(message)]

    def runs(self) -> list[Record]:
        """A line for each run, the newest first; event files that are new are read."""
        self._read_folder()
        with self._lock:
            lines = [run.summary() for run in self._runs.values()]
        return sorted(lines, key=lambda line: str(line["run"]), reverse=True)

    def records(self, run_id: str) -> str | None:
        """The records of a run as JSON; None if there is no such run."""
        with self._lock:
            run = self._runs.get(run_id)
            return None if run is None else run.to_json()

    def listen(self, most: int) -> BookListener:
        """A listener to every record from now on; beyond ``most`` the oldest one is ended."""
        listener = BookListener(self._dismiss)
        with self._lock:
            while len(self._listeners) >= most:
                self._listeners.pop(0).end()
            self._listeners.append(listener)
        return listener

    def end_listeners(self) -> None:
        with self._lock:
            for listener in self._listeners:
                listener.end()
            self._listeners = []

    def _dismiss(self, listener: BookListener) -> None:
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def _make_room(self, run_id: str) -> None:
        """Forgets the oldest run if there are too many for a new one."""
        while run_id not in self._runs and len(self._runs) >= MOST_RUNS:
            del self._runs[min(self._runs)]

    def _read_folder(self) -> None:
        """Reads event files that have grown since the last look, those of the newest runs."""
        if self._folder is None or not exists(self._folder):  # the first fit makes it
            return
        with self._reading:
            sizes = sizes_of_files(self._folder, ENDING)
            for path in sorted(sizes, key=_run_of, reverse=True):
                with self._lock:
                    if len(self._runs) >= MOST_RUNS and _run_of(path) < min(self._runs):
                        return
                self._read_file(path, sizes[path])

    def _read_file(self, path: str, size: int | None) -> None:
        run_id = _run_of(path)
        with self._lock:
            run = self._runs.get(run_id)
        if run is not None and (path not in self._read or run.ended):
            return
        known = self._read.get(path)
        if size is not None and known == min(size, MOST_FILE_BYTES):
            return
        try:
            content = read_start(path, MOST_FILE_BYTES)
        except ResourceError:  # the other runs are shown
            return
        if known == len(content):
            return
        self._read[path] = len(content)
        read = _run_in(content, run_id)
        with self._lock:
            self._make_room(run_id)
            self._runs[run_id] = read


def _run_of(path: str) -> str:
    return path.rsplit("/", 1)[-1].removesuffix(ENDING)


def _run_in(content: bytes, run_id: str) -> RunRecords:
    """The run in an event file; lines that are cut or foreign are left out."""
    run = RunRecords(run_id)
    for line in content.splitlines():
        try:
            event: dict[str, Any] = json.loads(line)
            record = record_of(event, float(event["time"]))
            if record is not None:
                run.add(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            continue
    return run


class BookSink:
    """A sink that writes one fit, or one search, into a book."""

    wants_progress = True

    def __init__(self, add: Callable[[str, Record], None], clock: Callable[[], float]) -> None:
        self._add, self._clock = add, clock
        self._run_id = ""

    def handle(self, event: Event) -> None:
        """Adds the event's record."""
        if isinstance(event, TrainingBegan):
            self._run_id = event.run.run_id
        elif isinstance(event, SearchBegan):
            self._run_id = event.search_id
        record = record_of(as_json(event), self._clock())
        if record is not None:
            self._add(self._run_id, record)


class BookListener(Closing):
    """One tab of a browser: the messages that it has yet to be sent."""

    def __init__(self, dismiss: Callable[[BookListener], None]) -> None:
        self._dismiss = dismiss
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def put(self, message: str) -> bool:
        """False if the listener is too slow, and was ended."""
        if self._queue.qsize() > MOST_WAITING:
            self.end()
            return False
        self._queue.put(message)
        return True

    def end(self) -> None:
        """The listener gets no more messages."""
        self._queue.put(None)

    def get(self, timeout_s: float) -> str | None:
        """The next message, ``''`` if none came in time, None at the end."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def close(self) -> None:
        self._dismiss(self)
