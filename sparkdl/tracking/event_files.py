"""Sinks that write files: ``JsonLines``, an event a line; ``Timeline``, for Perfetto."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import BinaryIO

from sparkdl.files.storage import check_writable, create_local, require_plain, write_bytes
from sparkdl.process.closing import Closing
from sparkdl.progress import events
from sparkdl.tracking.sinks import Thinning
from sparkdl.training.phases import Phase, Spans

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
            case _:
                pass

    def _did(self, name: str) -> None:
        """The driver did this until now."""
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
