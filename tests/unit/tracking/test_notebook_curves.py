"""The curves of a fit in a notebook: a picture at each epoch's end, and few between."""

from __future__ import annotations

import pytest
from tracking_cases import RUN, Time, small_fit

from sparkdl.progress.events import EpochProgressed, TrainingBegan, TrainingFailed
from sparkdl.tracking.notebook import NotebookCurves

pytest.importorskip("matplotlib")


def test_a_picture_is_drawn_at_each_epochs_end_and_at_the_end() -> None:
    shown: list[tuple[bytes, str]] = []
    sink = NotebookCurves(show=lambda picture, text: shown.append((picture, text)), clock=Time())
    for event in small_fit():
        sink.handle(event)
    texts = [text for _, text in shown]
    assert texts == [
        "epoch 1 of 2, 100 rows/s", "epoch 1 of 2", "epoch 2 of 2", "2 epochs done",
    ]  # fmt: skip
    assert all(picture.startswith(b"\x89PNG") for picture, _ in shown)
    assert len(shown[-1][0]) > len(shown[0][0])  # more to see


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
