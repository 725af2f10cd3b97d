"""``JsonLines``: a fit's events as a file with one JSON object per line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from sparkdl.files.growing_file import GrowingFile
from sparkdl.progress.events import (
    EpochProgressed,
    Event,
    LinesLogged,
    SearchBegan,
    SearchEnded,
    TrainingBegan,
    TrainingEnded,
    TrainingFailed,
    TrialBegan,
    TrialEpochEnded,
    WorkersProgressed,
    as_json,
)
from sparkdl.tracking.sinks import Thinning

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
        self._thinned = {EpochProgressed: Thinning(), WorkersProgressed: Thinning()}

    def handle(self, event: Event) -> None:
        """Writes a line."""
        now = self._clock()
        if isinstance(event, TrainingBegan):
            many = max(1.0, event.run.num_workers / 8)  # a line about workers has all of them
            self._thinned = {
                EpochProgressed: Thinning(),
                WorkersProgressed: Thinning(most=500 / many),
            }
            self._open(event.run.run_id)
        elif isinstance(event, SearchBegan):
            self._open(event.search_id)
        if self._file is None:
            return
        thinning = self._thinned.get(type(event))
        if thinning is not None and not thinning.due(now):
            return
        line = json.dumps({"time": round(now, 3), **as_json(event)}, separators=(",", ":"))
        self._file.append(line.encode() + b"\n")
        often = thinning is not None or isinstance(
            event, (TrialBegan, TrialEpochEnded, LinesLogged)
        )
        self._file.flush(whole=not often)
        if isinstance(event, (TrainingEnded, TrainingFailed, SearchEnded)):
            self._file.close()
            self._file = None

    def _open(self, run_id: str) -> None:
        self._file = GrowingFile(f"{self._folder.rstrip('/')}/{run_id}{ENDING}")
