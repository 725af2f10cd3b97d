"""Which sinks a fit has, and what happens to one that raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tracking_cases import RUN, small_fit

from sparkdl.errors import ConfigError
from sparkdl.progress.events import EpochBegan, Event, TrainingBegan, TrainingEnded
from sparkdl.tracking import Timeline
from sparkdl.tracking.sinks import add_standing, remove_standing, sinks_of, without_standing


class Kept:
    wants_progress = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.model: object = None

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def take_model(self, model: Callable[[], object]) -> None:
        self.model = model()


def nothing() -> object:
    return None


def test_a_function_is_a_sink_of_all_events() -> None:
    found: list[Event] = []
    (sink,) = sinks_of([found.append], nothing)
    assert sink.wants_progress
    assert not sink.wants_spans
    for event in small_fit():
        sink.handle(event)
    assert len(found) == len(small_fit())


def test_a_sink_says_what_it_wants_and_is_given_the_model() -> None:
    kept = Kept()
    sinks = sinks_of([kept, Timeline("t.json")], lambda: "the model")
    assert [s.wants_progress for s in sinks] == [False, False]
    assert [s.wants_spans for s in sinks] == [False, True]
    assert kept.model == "the model"


def test_the_fits_of_a_search_are_not_told_to_standing_sinks() -> None:
    add_standing(Kept)
    try:
        with without_standing():
            assert sinks_of([], nothing) == []
            assert len(sinks_of([Kept()], nothing)) == 1
        assert len(sinks_of([], nothing)) == 1
    finally:
        remove_standing(Kept)


def test_a_standing_sink_is_made_for_every_fit_until_it_is_removed() -> None:
    made: list[Kept] = []

    def make() -> Kept:
        made.append(Kept())
        return made[-1]

    add_standing(make)
    try:
        for epoch in range(2):
            for sink in sinks_of([], nothing):
                sink.handle(EpochBegan(epoch))
    finally:
        remove_standing(make)
    assert [kept.events for kept in made] == [[EpochBegan(0)], [EpochBegan(1)]]
    assert sinks_of([], nothing) == []


def test_what_a_sink_raises_later_is_a_warning_and_the_last_that_it_hears() -> None:
    heard: list[Event] = []

    def breaks(event: Event) -> None:
        heard.append(event)
        if isinstance(event, EpochBegan):
            raise OSError("disk full")

    (sink,) = sinks_of([breaks], nothing)
    sink.handle(TrainingBegan(0, 1, RUN))
    with pytest.warns(RuntimeWarning, match="sink breaks raised OSError: disk full"):
        sink.handle(EpochBegan(0))
    sink.handle(TrainingEnded(1))
    assert len(heard) == 2
    assert not sink.wants_progress


def test_what_a_sink_raises_at_the_beginning_is_raised() -> None:
    def breaks(event: Event) -> None:
        raise PermissionError("no")

    (sink,) = sinks_of([breaks], nothing)
    with pytest.raises(PermissionError):
        sink.handle(TrainingBegan(0, 1, RUN))
    sink.handle(EpochBegan(0))  # no warning that the fit, which has ended, goes on


@pytest.mark.parametrize("wrong", ["logs", 3, object(), Kept])
def test_what_is_no_sink_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="sinks has something that is no sink"):
        sinks_of([wrong], nothing)
