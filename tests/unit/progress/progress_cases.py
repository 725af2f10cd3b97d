"""What the tests of progress share: a clock, a recording sink, and reports of workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from sparkdl.progress.events import EpochProgress, Event, Metrics, RunProgress
from sparkdl.progress.monitor import FitMonitor
from sparkdl.training.changes import VariableChanges
from sparkdl.training.reports import MetricState

E = TypeVar("E")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Recorder:
    """A sink that keeps the events, and decides what the test says."""

    has_callbacks: bool = False
    wants_progress: bool = True
    stop_wanted: bool = False
    learning_rate: float | None = 0.1
    events: list[Event] = field(default_factory=list)
    on_event: Callable[[Recorder, Event], None] = lambda recorder, event: None

    def handle(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(self, event)

    def model_sent(self) -> None: ...

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def take_changes(self) -> VariableChanges:
        return VariableChanges()

    def write_again(self) -> None: ...

    def of(self, kind: type[E]) -> list[E]:
        return [e for e in self.events if isinstance(e, kind)]

    @property
    def names(self) -> list[str]:
        return [type(e).__name__ for e in self.events]


def mean(state: MetricState) -> Metrics:
    """The metric state ``[total, count]`` as Keras' mean."""
    total, count = state if state.size else (0.0, 0.0)
    return {"loss": float(total / count) if count else 0.0}


def make_monitor(
    recorder: Recorder, clock: Clock | None = None, epochs: int = 3, first_epoch: int = 0
) -> FitMonitor:
    return FitMonitor(
        recorder, [], mean, epochs=epochs, first_epoch=first_epoch, clock=clock or Clock()
    )


def epoch(
    rows: int, missing: int = 0, loss: float = 1.0, seconds: float | None = None
) -> EpochProgress:
    """An epoch of 1,000 rows in batches of 10."""
    state = np.array([rows * loss, rows]) if rows else np.empty(0)
    return EpochProgress(missing, rows // 10, rows, state, np.empty(0), seconds)


def report(*epochs: EpochProgress, joined: int = 2) -> RunProgress:
    return RunProgress(
        epochs=dict(enumerate(epochs)), batches_per_epoch=100, rows=sum(e.rows for e in epochs),
        joined=joined,
    )  # fmt: skip
