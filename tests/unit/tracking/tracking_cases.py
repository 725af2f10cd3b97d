"""The events of a small fit of two workers, for the tests of sinks."""

from __future__ import annotations

import numpy as np

from sparkdl.process.host_load import HostLoad
from sparkdl.progress.events import (
    EpochBegan,
    EpochEnded,
    EpochProgressed,
    Event,
    LinesLogged,
    RunDescription,
    SearchBegan,
    SearchEnded,
    TrainingBegan,
    TrainingEnded,
    TrialBegan,
    TrialEnded,
    TrialEpochEnded,
    WorkersJoined,
    WorkersProgressed,
    WorkerTraced,
    WorkerView,
)
from sparkdl.training.phases import PHASES, ServerUsage, Spans, Usage

RUN = RunDescription(
    "20261122-120000-abc123", "digits", 2,
    {"mode": "asynchronous", "optimizer_learning_rate": 0.5, "rule": {"name": "mean"}, "x": None},
)  # fmt: skip


class Time:
    """A clock that goes on by ``step`` each time that it is asked."""

    def __init__(self, now: float = 1000.0, step: float = 0.0) -> None:
        self.now, self.step = now, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def usage(**seconds: float) -> Usage:
    return Usage({phase: seconds.get(phase, 0.0) for phase in PHASES}, 1.5, 200 << 20, 10, 20)


def workers(rows: int, **seconds: float) -> WorkersProgressed:
    """Rank 0 is twice as fast as rank 1."""
    views = [
        WorkerView(
            rank, "training", host="here", pid=rank, epoch=0, batch=rows // 10,
            batches_per_epoch=10, rows=rows // (rank + 1), staleness=0.5, usage=usage(**seconds),
        )
        for rank in range(2)
    ]  # fmt: skip
    return WorkersProgressed(tuple(views), 1000, 2000)


def spans(began_at: float, *found: tuple[str, float]) -> Spans:
    starts = np.cumsum([0.0, *(s for _, s in found)])
    order = np.array([PHASES.index(phase) for phase, _ in found], float)  # type: ignore[arg-type]
    return Spans(began_at, starts[:-1], order, float(starts[-1]))


def small_fit() -> list[Event]:
    """Two epochs of 20 batches, 200 rows."""
    events: list[Event] = [TrainingBegan(0, 2, RUN)]
    for epoch in range(2):
        loss = 1.0 / (epoch + 1)
        events += [
            EpochBegan(epoch),
            WorkersJoined(epoch, 2),
            workers(100 + 200 * epoch, start=1.0, compute=1.0 + epoch),
            EpochProgressed(epoch, 10, 20, {"loss": loss + 0.5, "f1": [0.25, 0.75]}, 100.0, 0.5),
            workers(200 + 200 * epoch, start=1.0, compute=1.75 + epoch, exchange=0.25),
            EpochEnded(
                epoch, 20, 20, 200, {"loss": loss, "f1": [0.5, 1.0], "val_loss": loss + 0.25},
                50.0, 0.5,
            ),
        ]  # fmt: skip
    for rank in range(2):
        events.append(WorkerTraced(rank, spans(1000.0 + rank, ("start", 1.0), ("compute", 2.0))))
    return [*events, TrainingEnded(2)]


SEARCH_ID = "20261122-130000-abc123"


def small_search(trials: int = 12) -> list[Event]:
    """Trials of two epochs; the last one fails, the one before is the best."""
    began = SearchBegan(
        SEARCH_ID, "val_accuracy", True,
        {"searcher": "RandomSearch", "max_epochs": 2, "expected_epochs": 2 * trials},
    )  # fmt: skip
    events: list[Event] = [began]
    for number in range(trials):
        events.append(TrialBegan(number, {"rate": 10.0**-number, "kind": "ab"[number % 2]}, 0, 2))
        explained = {"rate": 0.75, "kind": 0.0} if number >= 9 else {}
        if number == trials - 1:
            error = "ValueError: no such network"
            events.append(TrialEnded(number, 2, "failed", {}, error, explained))
            break
        for epoch in range(2):
            metrics = {"loss": 1.0, "val_accuracy": 0.5 + 0.03 * number + 0.1 * epoch}
            events.append(TrialEpochEnded(number, epoch, metrics))
        events.append(TrialEnded(number, 2, "complete", metrics, "", explained))
    return [*events, SearchEnded(trials - 2, 0.6 + 0.03 * (trials - 2))]


def servers(look: int) -> tuple[ServerUsage, ...]:
    """Two that hold rows of tables, of which the second works on three requests."""
    moved = 10**6 * look
    return tuple(
        ServerUsage(f"node{n}", 50_000_000, moved, 2 * moved, 1000 * look, 1.25, 3 * n)
        for n in range(2)
    )


def busy_fit(looks: int = 40) -> list[Event]:
    """A fit of four workers on two hosts with two GPUs each, that says a line at each look."""
    events: list[Event] = [TrainingBegan(0, 1, RUN), EpochBegan(0)]
    for look in range(1, looks + 1):
        views = tuple(
            WorkerView(
                rank, "training", host=f"node{rank % 2}", pid=rank, batch=look, rows=100 * look,
                batches_per_epoch=looks, usage=usage(read=1.0 * look, compute=2.0 * look),
                load=HostLoad(40.0 + look, 95.0, (93.0, 0.0), (50.0, 10.0)) if rank > 1 else None,
            )
            for rank in range(4)
        )  # fmt: skip
        events += [
            WorkersProgressed(views, 1000 * look, 2000 * look, HostLoad(10.0, 20.0), servers(look)),
            EpochProgressed(0, look, looks, {"loss": 1.0 / look}, 400.0),
            LinesLogged(((look % 4, f"WARNING reader: line {look}"),)),
        ]
    return events
