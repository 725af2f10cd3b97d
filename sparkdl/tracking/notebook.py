"""``NotebookCurves``: loss and metrics as a small picture that is drawn again while a fit runs."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.progress.events import (
    EpochEnded,
    EpochProgressed,
    Event,
    Metrics,
    TrainingBegan,
    TrainingEnded,
    TrainingFailed,
)

_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#a3acb6"
_MOST_POINTS = 1000


class NotebookCurves:
    """A sink that draws the curves of a fit into the output of a notebook's cell.

    ::

        spark_model.fit(df, epochs=5, verbose=0, sinks=[sparkdl.tracking.NotebookCurves()])

    One picture takes the place of the one before. Needs matplotlib; drawing takes some tenths of a
    second of the driver's time.

    Args:
        every_s: Least time between two pictures of one epoch; there is one at each epoch's end.
        show: Takes a picture as PNG bytes, and a text; None: the cell's output, by IPython.
        clock: Seconds.

    Raises:
        ConfigError: matplotlib is not installed, or IPython where ``show`` is None.
    """

    wants_progress = True

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
        self._show = show or _cell_output()
        self._points: dict[str, list[tuple[float, float]]] = {}
        self._due = 0.0
        self._epochs, self._text = 0, ""

    def handle(self, event: Event) -> None:
        """Takes note; draws where it is due."""
        match event:
            case TrainingBegan():
                self._points, self._due, self._epochs = {}, 0.0, event.epochs
                self._show = self._given_show or _cell_output()
            case EpochProgressed():
                x = event.epoch + event.batches / max(1, event.batches_per_epoch)
                self._add(x, event.metrics, " so far")
                self._text = f"epoch {event.epoch + 1} of {self._epochs}"
                if event.rows_per_s:
                    self._text += f", {event.rows_per_s:,.0f} rows/s"
                if self._clock() >= self._due:
                    self._draw()
            case EpochEnded():
                self._add(event.epoch + 1.0, event.metrics, "")
                self._text = f"epoch {event.epoch + 1} of {self._epochs}"
                self._draw()
            case TrainingEnded():
                self._text = f"{event.epochs_done} epochs done"
                self._draw()
            case TrainingFailed():
                self._text = event.error
                self._draw()
            case _:
                pass

    def _add(self, x: float, metrics: Metrics, kind: str) -> None:
        for name, value in metrics.items():
            if isinstance(value, float):
                points = self._points.setdefault(name + kind, [])
                points.append((x, value))
                if len(points) > _MOST_POINTS:
                    del points[1::2]

    def _draw(self) -> None:
        names = [n for n in self._points if not n.startswith("val_")]
        names = sorted({n.removesuffix(" so far") for n in names}, key=lambda n: (n != "loss", n))
        if not names:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.0 * len(names[:3]), 2.6), layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        for place, name in enumerate(names[:3], 1):
            axes = figure.add_subplot(1, len(names[:3]), place)
            curves = [(f"{name} so far", _GREY, "-", ""), (name, _BLUE, "-", "training"),
                      (f"val_{name}", _ORANGE, "--", "validation")]  # fmt: skip
            for key, colour, dashes, label in curves:
                if points := self._points.get(key):
                    x, y = zip(*points, strict=True)
                    mark = "." if label and len(x) < 30 else ""
                    axes.plot(x, y, dashes, color=colour, marker=mark, label=label or None)
            axes.set_title(name, fontsize=9)
            axes.tick_params(labelsize=8)
            if place == 1 and axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8, frameon=False)
        picture = io.BytesIO()
        canvas.print_png(picture)
        self._show(picture.getvalue(), self._text)
        self._due = self._clock() + self._every_s


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
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ConfigError(
            f"curves in a notebook need {package}",
            expected=f"{package} on the driver",
            received="it is not installed",
            hint=f"pip install {package.lower()}",
        )
