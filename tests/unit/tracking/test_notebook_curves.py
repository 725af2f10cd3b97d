"""The curves of a fit in a notebook: a picture at each epoch's end, and few between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tracking_cases import RUN, Time, small_fit, small_search

from sparkdl.progress.events import EpochEnded, EpochProgressed, TrainingBegan, TrainingFailed
from sparkdl.tracking.notebook import NotebookCurves, NotebookTrials, curves_take_the_bars_place

pytest.importorskip("matplotlib")


def test_a_picture_is_drawn_at_each_epochs_end_and_at_the_end() -> None:
    shown: list[tuple[bytes, str]] = []
    sink = NotebookCurves(show=lambda picture, text: shown.append((picture, text)), clock=Time())
    for event in small_fit():
        sink.handle(event)
    texts = [text for _, text in shown]
    assert texts == [
        "2 workers joined", "epoch 1 of 2, 100 rows/s, staleness 0.5",
        "epoch 1 of 2, 50 rows/s, staleness 0.5", "epoch 2 of 2, 50 rows/s, staleness 0.5",
        "2 epochs done",
    ]  # fmt: skip
    assert all(picture.startswith(b"\x89PNG") for picture, _ in shown)
    assert len(shown[-1][0]) > len(shown[0][0])  # more to see


def test_a_metric_with_several_values_has_a_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.figure

    figures: list[Any] = []

    class Kept(matplotlib.figure.Figure):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            figures.append(self)

    monkeypatch.setattr(matplotlib.figure, "Figure", Kept)
    texts: list[str] = []
    sink = NotebookCurves(show=lambda picture, text: texts.append(text), clock=Time())
    sink.handle(TrainingBegan(0, 2, RUN))
    for number, f1 in enumerate(([0.25, 1.0], [0.5, 0.75])):
        metrics = {"loss": 1.0, "f1": list(f1), "val_f1": [[0.0, 0.125]]}
        sink.handle(EpochEnded(number, 1, 1, 10, metrics, 0.25))
    assert texts[-1] == "epoch 2 of 2, 0.25 rows/s"
    loss, scores = figures[-1].axes
    assert (loss.get_title(), scores.get_title()) == ("loss", "f1")
    drawn = [list(line.get_ydata()) for line in scores.lines]
    assert drawn == [[0.25, 0.5], [1.0, 0.75], [0.0, 0.0], [0.125, 0.125]]


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 3)), (15, (4, 3))])
def test_every_metric_has_curves_and_what_has_none_is_said(
    monkeypatch: pytest.MonkeyPatch, count: int, grid: tuple[int, int]
) -> None:
    import matplotlib.figure

    placed: list[Any] = []

    class Kept(matplotlib.figure.Figure):
        def add_subplot(self, *place: Any, **options: Any) -> Any:
            placed.append(place)
            return super().add_subplot(*place, **options)

    monkeypatch.setattr(matplotlib.figure, "Figure", Kept)
    texts: list[str] = []
    sink = NotebookCurves(show=lambda picture, text: texts.append(text), clock=Time())
    sink.handle(TrainingBegan(0, 1, RUN))
    names = ["loss", *(f"metric_{i}" for i in range(1, count))]
    sink.handle(EpochEnded(0, 1, 1, 10, dict.fromkeys(names, 0.5)))
    assert placed == [(*grid, place) for place in range(1, min(count, 12) + 1)]
    assert texts[-1].endswith("3 more metrics are in the History") == (count == 15)


def test_between_epochs_there_are_few_pictures_and_an_error_is_said() -> None:
    shown: list[str] = []
    time = Time(step=0.05)
    sink = NotebookCurves(show=lambda picture, text: shown.append(text), clock=time)
    sink.handle(TrainingBegan(0, 1, RUN))
    for batches in range(200):  # 10 s
        sink.handle(EpochProgressed(0, batches, 1000, {"loss": 1.0}))
    assert 4 <= len(shown) <= 6
    sink.handle(TrainingFailed("ValueError: bad rows"))
    assert shown[-1] == "ValueError: bad rows"


def test_many_short_epochs_are_not_slowed_down_by_pictures() -> None:
    """Before, each had a picture of some tenths of a second."""
    time = Time()
    shown: list[str] = []

    def show(picture: bytes, text: str) -> None:
        shown.append(text)
        time.now += 0.2

    sink = NotebookCurves(show=show, clock=time)
    sink.handle(TrainingBegan(0, 1000, RUN))
    for epoch in range(1000):
        sink.handle(EpochEnded(epoch, 1, 1, 10, {"loss": 1.0}))
        time.now += 0.01
    assert 8 < len(shown) < 20
    assert time.now - 1000.0 < 1.3 * 10.0  # a fifth of the time, and no more


def test_the_trials_of_a_search_are_drawn_and_the_best_is_named() -> None:
    shown: list[tuple[bytes, str]] = []
    sink = NotebookTrials(show=lambda picture, text: shown.append((picture, text)), clock=Time())
    for event in small_search():
        sink.handle(event)
    assert "1 trials, best val_accuracy 0.6 (trial 0)" in shown[1][1]
    assert shown[-1][1] == "12 trials, 1 failed, best val_accuracy 0.9 (trial 10), done"
    assert all(picture.startswith(b"\x89PNG") for picture, _ in shown)


def test_the_bar_keeps_its_place_where_there_is_no_notebook(capsys: Any) -> None:
    assert not curves_take_the_bars_place("auto")
    assert not curves_take_the_bars_place(1)


CELL = """
import sys
sys.path[:0] = {folders!r}
from tracking_cases import small_fit, small_search
from sparkdl.progress.bar import ProgressBar
from sparkdl.spark.fit.fitting import progress_sink
from sparkdl.tracking.notebook import NotebookTrials, curves_take_the_bars_place
"""


@pytest.mark.processes
def test_in_a_kernel_curves_take_the_bars_place(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    new = nbformat.v4.new_code_cell
    tell = "for event in small_fit():\n    sink.handle(event)"
    notebook = nbformat.v4.new_notebook(
        cells=[
            new(CELL.format(folders=folders)),
            new(f"sink = progress_sink('auto')\n{tell}"),
            new(f"sink = progress_sink(1)\nassert isinstance(sink, ProgressBar)\n{tell}"),
            new("assert curves_take_the_bars_place('auto')\nsink = NotebookTrials()\n"
                "for event in small_search():\n    sink.handle(event)"),
            new("sys.modules['matplotlib'] = None\nimport importlib.util as found\n"
                "found.find_spec = lambda name: None\nimport sparkdl.tracking.notebook as n\n"
                "n.find_spec = found.find_spec\n"
                f"sink = progress_sink('auto')\n{tell}"),
        ]
    )  # fmt: skip
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    _, curves, bar, trials, without = ([*cell.outputs] for cell in notebook.cells)
    assert [list(o.data) for o in curves] == [["image/png", "text/plain"]]  # one, drawn anew
    assert [list(o.data) for o in trials] == [["image/png", "text/plain"]]
    assert all("Epoch 2/2" in "".join(o.text for o in found) for found in (bar, without))
