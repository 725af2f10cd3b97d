"""The progress bar: a live line in a terminal or notebook, one line per epoch anywhere else."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

from sparkdl.progress import events

_WIDTH = 24
_NOTEBOOK_COLUMNS = 200
_SHOWN = 4
"""Values of an array metric that are shown in full; of more, the first two and the last."""


class ProgressBar:
    """A sink that writes steps, metrics, rows per second of all workers, and staleness.

    Keras' Progbar shows seconds per step and the time left from when it was made; here several
    epochs may end between two looks at the workers, so those figures would mislead.

    Args:
        verbose: 1: a line that is written over and over, where somebody watches it; 2: a line per
            epoch. 0: nothing.
        stream: Where to; None for ``sys.stdout``, whatever that is at each event.
    """

    def __init__(self, verbose: int, stream: TextIO | None = None) -> None:
        self._verbose, self._given = verbose, stream
        self.wants_progress = False
        self._epochs = self._length = 0
        self._title = ""

    def handle(self, event: events.Event) -> None:
        if not self._verbose:
            return
        match event:
            case events.TrainingBegan():
                self._epochs = event.epochs
                self.wants_progress = self._verbose == 1 and is_live(self._stream)
            case events.EpochBegan():
                self._title = f"Epoch {event.epoch + 1}/{self._epochs}"
                if self.wants_progress:
                    self._write(self._title, "\n")
            case events.WorkersJoined() if self.wants_progress:
                s = "" if event.workers == 1 else "s"
                self._write(f"{event.workers} worker{s} joined", "")
            case events.WorkersAwaited() if event.ranks:
                s, was = ("", "was") if len(event.ranks) == 1 else ("s", "were")
                ranks = ", ".join(map(str, event.ranks))
                again = "it is" if not s else "they are"
                line = f"worker{s} {ranks} {was} lost; the others wait until {again} started again"
                self._write(line, "\n")
            case events.EpochProgressed() if self.wants_progress:
                self._write(self._steps(event), "")
            case events.EpochEnded() if self.wants_progress:
                self._write(self._steps(event), "\n")
            case events.EpochEnded():
                figures = [*_metrics(event), *_speed(event), *_staleness(event)]
                self._write(" - ".join([self._title, *figures]), "\n")
            case events.TrainingFailed() if self._length:  # the error goes onto a line of its own
                print(flush=True, file=self._stream)

    @property
    def _stream(self) -> TextIO:
        return self._given or sys.stdout

    def _steps(self, event: events.EpochProgressed | events.EpochEnded) -> str:
        """The line of an epoch, which fits the screen: what is least needed goes first.

        First staleness, half of the bar, the bar, rows per second, the count of batches; then
        metrics from the last on, those of training but the first before those of validation rows.
        """
        limit = _columns(self._stream) - 1
        done, target = event.batches, event.batches_per_epoch
        count = f"{done:>{len(str(target))}}/{target} "
        metrics, rate = _metrics(event), _speed(event)
        for width, figures in (
            (_WIDTH, [*metrics, *rate, *_staleness(event)]),
            (_WIDTH, [*metrics, *rate]),
            (_WIDTH // 2, [*metrics, *rate]),
            (0, [*metrics, *rate]),
            (0, metrics),
        ):
            line = count + self._bar(done, target, width) + " - ".join(figures)
            if len(line) <= limit:
                return line
        kept, more = list(metrics), ""
        while len(" - ".join(kept) + more) > limit and len(kept) > 1:
            training = [part for part in kept[1:] if not part.startswith("val_")]
            kept.remove((training or kept)[-1])
            more = " - .."
        return (" - ".join(kept) + more)[:limit]

    def _bar(self, done: int, target: int, width: int) -> str:
        if not width:
            return ""
        filled = width * done // target if target else width
        full, rest = _strokes(self._stream)
        return full * filled + rest * (width - filled) + " "

    def _write(self, line: str, end: str) -> None:
        """Writes over the line before it if that has no end; a line without an end never wraps."""
        stream = self._stream
        if not end:
            line = line[: _columns(stream) - 1]
        padding = " " * max(0, self._length - len(line))  # a shorter line hides the one before
        start = "\r" if self._length else ""
        self._length = 0 if end else len(line)
        print(start + line + padding, end=end, flush=True, file=stream)


def is_live(stream: TextIO) -> bool:
    """Whether somebody watches ``stream`` who sees a line being written over.

    That is a terminal, or the output of a cell in a notebook: a kernel's shell that talks to a
    frontend, and not a process that merely has ``ipykernel`` imported, nor a cell whose output
    goes to a file.
    """
    return os.environ.get("TERM") != "dumb" if stream.isatty() else is_cell(stream)


def is_cell(stream: TextIO) -> bool:
    """Whether ``stream`` is the output of a cell in a notebook; see :func:`is_live`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    kernel = any(cls.__name__ == "ZMQInteractiveShell" for cls in type(shell).__mro__)
    return kernel and type(stream).__module__.partition(".")[0] == "ipykernel"


def _columns(stream: TextIO) -> int:
    return shutil.get_terminal_size().columns if stream.isatty() else _NOTEBOOK_COLUMNS


def _strokes(stream: TextIO) -> tuple[str, str]:
    """The characters of the bar: lines, or ASCII where the stream cannot write them."""
    try:
        "━─".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "=", "-"
    return "━", "─"


def _metrics(event: events.EpochProgressed | events.EpochEnded) -> list[str]:
    return [f"{name}: {_short(value)}" for name, value in event.metrics.items()]


def _speed(event: events.EpochProgressed | events.EpochEnded) -> list[str]:
    return [speed(event.rows_per_s)] if event.rows_per_s else []


def _staleness(event: events.EpochProgressed | events.EpochEnded) -> list[str]:
    return [f"staleness {event.staleness:.1f}"] if event.staleness else []


def speed(rows_per_s: float) -> str:
    """Rows per second in few characters; slow training is no standstill.

    >>> speed(1234.5), speed(7.25), speed(0.125)
    ('1,234 rows/s', '7.2 rows/s', '0.12 rows/s')
    """
    return f"{rows_per_s:,.0f} rows/s" if rows_per_s >= 10 else f"{rows_per_s:.2g} rows/s"


def _short(value: events.MetricValue) -> str:
    """A metric's value in few characters.

    >>> _short([0.5, 0.25]), _short([0.0, 1.0, 2.0, 3.0, 4.0])
    ('[0.5000 0.2500]', '[0.0000 1.0000 .. 4.0000]')
    """
    if not isinstance(value, list):
        return f"{value:.4f}"
    texts = [_short(v) for v in value]
    if len(texts) > _SHOWN:
        texts = [*texts[:2], "..", texts[-1]]
    return f"[{' '.join(texts)}]"
