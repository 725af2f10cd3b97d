"""Loss and metrics as a small picture in a notebook, drawn again while a fit or a search runs.

It takes the place of the progress bar by itself, where matplotlib is installed.
"""

from __future__ import annotations

import io
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.progress import events
from sparkdl.progress.bar import is_cell, speed
from sparkdl.tracking.event_files import numbers_of

_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#a3acb6"
_ABREAST = 3
_MOST_CURVES = 12
_MOST_POINTS = 1000
_REST = 4.0
"""The pause after a picture, as a multiple of the time that it took."""


def curves_take_the_bars_place(verbose: str | int) -> bool:
    """Whether ``verbose='auto'`` means curves: in a cell of a notebook, with matplotlib."""
    return verbose == "auto" and is_cell(sys.stdout) and find_spec("matplotlib") is not None


class _Picture(ABC):
    """A sink that draws a picture in the place of the one before."""

    def __init__(
        self,
        *,
        every_s: float = 2.0,
        show: Callable[[bytes, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _require("matplotlib")
        self._every_s, self._clock = every_s, clock
        self._given_show = show
        self._text = ""
        self._begin()

    def _begin(self) -> None:
        self._due = self._rested = 0.0
        self._show = self._given_show or _cell_output()

    def _draw(self, *, always: bool = False) -> None:
        """Draws, unless pictures already take much of the time."""
        began = self._clock()
        if began < self._rested and not always:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=self._size(), layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        self._fill(figure)
        figure.suptitle(self._text, fontsize=9, x=0.01, ha="left")
        picture = io.BytesIO()
        canvas.print_png(picture)
        self._show(picture.getvalue(), self._text)
        now = self._clock()
        self._due, self._rested = now + self._every_s, now + _REST * (now - began)

    @abstractmethod
    def _size(self) -> tuple[float, float]:
        """The size of the figure, in inches."""

    @abstractmethod
    def _fill(self, figure: object) -> None:
        """Draws into an empty figure."""


class NotebookCurves(_Picture):
    """A sink that draws the curves of a fit into the output of a notebook's cell.

    ::

        spark_model.fit(df, epochs=5, verbose=0, sinks=[sparkdl.tracking.NotebookCurves()])

    With ``verbose='auto'``, the default of ``fit``, it takes the progress bar's place in a notebook
    where matplotlib is installed. A metric with several values has a line for each. One picture
    takes the place of the one before. Drawing takes some tenths of a second of the driver's time,
    and never more than a fifth of it.

    Args:
        every_s: Least time between two pictures of one epoch; there is one at each epoch's end.
        show: Takes a picture as PNG bytes, and a text; None: the cell's output, by IPython.
        clock: Seconds.

    Raises:
        ConfigError: matplotlib is not installed, or IPython where ``show`` is None.
    """

    wants_progress = True

    def handle(self, event: events.Event) -> None:
        match event:
            case events.TrainingBegan():
                self._points: dict[str, list[tuple[float, list[float]]]] = {}
                self._epochs = event.epochs
                self._begin()
            case events.WorkersJoined() if not self._points:
                s = "" if event.workers == 1 else "s"
                self._text = f"{event.workers} worker{s} joined"
                self._draw(always=True)
                self._due = 0.0
            case events.EpochProgressed():
                x = event.epoch + event.batches / max(1, event.batches_per_epoch)
                self._add(x, event.metrics, " so far")
                self._text = self._title(event)
                if self._clock() >= self._due:
                    self._draw()
            case events.EpochEnded():
                self._add(event.epoch + 1.0, event.metrics, "")
                self._text = self._title(event)
                self._draw()
            case events.TrainingEnded():
                self._text = f"{event.epochs_done} epochs done"
                self._draw(always=True)
            case events.TrainingFailed():
                self._text = event.error
                self._draw(always=True)

    def _title(self, event: events.EpochProgressed | events.EpochEnded) -> str:
        parts = [f"epoch {event.epoch + 1} of {self._epochs}"]
        if event.rows_per_s:
            parts.append(speed(event.rows_per_s))
        if event.staleness:
            parts.append(f"staleness {event.staleness:.1f}")
        if len(self._names) > _MOST_CURVES:
            parts.append(f"{len(self._names) - _MOST_CURVES} more metrics are in the History")
        return ", ".join(parts)

    def _add(self, x: float, metrics: events.Metrics, kind: str) -> None:
        for name, value in metrics.items():
            points = self._points.setdefault(name + kind, [])
            numbers = [number for _, number in numbers_of("", {name: value})]
            if not points or len(numbers) == len(points[0][1]):
                points.append((x, numbers))
            if len(points) > _MOST_POINTS:
                del points[1::2]

    @property
    def _names(self) -> list[str]:
        names = [n for n in self._points if not n.startswith("val_")]
        return sorted({n.removesuffix(" so far") for n in names}, key=lambda n: (n != "loss", n))

    def _size(self) -> tuple[float, float]:
        rows, columns = self._grid
        return (4.0 * columns, 2.6 * rows if self._names else 0.4)

    @property
    def _grid(self) -> tuple[int, int]:
        shown = min(len(self._names), _MOST_CURVES)
        columns = max(1, min(shown, _ABREAST))
        return -(-shown // columns), columns

    def _fill(self, figure: Any) -> None:
        for place, name in enumerate(self._names[:_MOST_CURVES], 1):
            axes = figure.add_subplot(*self._grid, place)
            curves = [(f"{name} so far", _GREY, "-", ""), (name, _BLUE, "-", "training"),
                      (f"val_{name}", _ORANGE, "--", "validation")]  # fmt: skip
            for key, colour, dashes, label in curves:
                if points := self._points.get(key):
                    x, y = zip(*points, strict=True)  # a metric with several values has more lines
                    mark = "." if label and len(x) < 30 else ""
                    for line in axes.plot(x, y, dashes, color=colour, marker=mark)[:1]:
                        line.set_label(label or None)
            axes.set_title(name, fontsize=9)
            axes.tick_params(labelsize=8)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if place == 1 and axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8, frameon=False)


class NotebookTrials(_Picture):
    """A sink that draws the trials of a search into the output of a notebook's cell: the metric of
    each over its epochs, and the best one so far in orange.

    With ``verbose='auto'``, the default of ``tune.search``, it takes the place of the printed lines
    in a notebook where matplotlib is installed. The arguments are those of :class:`NotebookCurves`.
    """

    wants_progress = False

    def handle(self, event: events.Event) -> None:
        match event:
            case events.SearchBegan():
                self._metric, self._sign = event.metric, 1.0 if event.maximize else -1.0
                self._curves: dict[int, dict[int, float]] = {}
                self._training: set[int] = set()
                self._failed: set[int] = set()
                self._begin()
            case events.TrialBegan():
                self._curves.setdefault(event.trial, {})
                self._training.add(event.trial)
            case events.TrialEpochEnded():
                value = event.metrics.get(self._metric)
                if isinstance(value, float):
                    self._curves.setdefault(event.trial, {})[event.epoch + 1] = value
                if self._clock() >= self._due:
                    self._tell("")
            case events.TrialEnded():
                self._training.discard(event.trial)
                if event.state == "failed":
                    self._failed.add(event.trial)
                self._tell("")
            case events.SearchEnded():
                self._training = set()
                self._tell(event.error or "done", always=True)

    def _tell(self, end: str, *, always: bool = False) -> None:
        parts = [f"{len(self._curves)} trials"]
        parts += [f"{len(self._training)} training"] * bool(self._training)
        parts += [f"{len(self._failed)} failed"] * bool(self._failed)
        best = self._best()
        if best is not None:
            last = self._curves[best][max(self._curves[best])]
            parts.append(f"best {self._metric} {last:.4g} (trial {best})")
        self._text = ", ".join(parts + [end] * bool(end))
        self._draw(always=always)

    def _best(self) -> int | None:
        """The trial whose latest epoch is best; one that failed is not."""
        there = {n: c[max(c)] for n, c in self._curves.items() if c and n not in self._failed}
        there = {n: value for n, value in there.items() if value == value}
        return max(there, key=lambda n: self._sign * there[n], default=None)

    def _size(self) -> tuple[float, float]:
        return (6.0, 3.0)

    def _fill(self, figure: Any) -> None:
        axes, best = figure.add_subplot(), self._best()
        for number, curve in self._curves.items():
            colour, width = (_ORANGE, 2.5) if number == best else (_GREY, 1.0)
            epochs = sorted(curve)
            mark = "." if len(epochs) < 30 else ""
            axes.plot(
                epochs, [curve[e] for e in epochs], color=colour, lw=width, marker=mark,
                zorder=3 if number == best else 2,
            )  # fmt: skip
        axes.set_xlabel("epochs", fontsize=8)
        axes.set_ylabel(self._metric, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)


def _cell_output() -> Callable[[bytes, str], None]:
    """Shows each picture in the place of the one before, below the cell that runs now."""
    _require("IPython")
    from IPython.display import Image, display

    handles: list[Any] = []

    def show(picture: bytes, text: str) -> None:
        shown = Image(data=picture, format="png", alt=text)
        if handles:
            handles[0].update(shown)
        else:
            handles.append(display(shown, display_id=True))

    return show


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"curves in a notebook need {package}", expected=f"{package} on the driver",
            received="it is not installed", hint=f"pip install {package.lower()}",
        )  # fmt: skip
