"""The events of a fit on the driver, and the sinks that are told of them.

A :class:`~sparkdl.progress.monitor.FitMonitor` makes the events from what the workers report and
hands each to every sink, in order and in the driver's thread::

    TrainingBegan  (EpochBegan  (WorkersJoined | EpochProgressed)*  EpochEnded)*  TrainingEnded

``WorkersProgressed`` and ``LinesLogged`` come anywhere after ``TrainingBegan``; ``WorkerTraced``
once per rank before ``TrainingEnded``, where a timeline is wanted. A fit that fails ends with
``TrainingFailed`` instead, wherever it is then. A search of hyper-parameters (``tune.search``)
tells events of its own, and its sinks hear nothing of the fits of its trials::

    SearchBegan  (TrialBegan | TrialEpochEnded | TrialEnded)*  SearchEnded

:class:`RunProgress` is what the workers report, put together: the numbers behind History and bar.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sparkdl.coordinator.telemetry import Status, WorkerStatus
from sparkdl.failures import Failure
from sparkdl.process.host_load import HostLoad
from sparkdl.training.phases import ServerUsage, Spans, Usage
from sparkdl.training.reports import MetricState, no_metrics

MetricValue = float | list["MetricValue"]
"""A metric's value: a number, or nested lists of numbers (one per class, for example)."""
Metrics = dict[str, MetricValue]
"""Name -> value over all workers, ``'loss'`` first; of validation rows with the prefix ``val_``."""
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
WorkerState = Literal["joining", "training", "waiting", "finished", "lost"]
"""``joining``: waits to be let in; ``waiting``: for the other ranks or the driver; ``lost``: its
process is gone, and no other attempt has come yet."""


@dataclass(frozen=True)
class RunDescription:
    """Which fit it is.

    Args:
        run_id: A name that no other fit has, in the order of time.
        parameters: What the fit was asked to do, by name: plain values.
    """

    run_id: str = ""
    model: str = ""
    num_workers: int = 0
    parameters: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingBegan:
    """A fit begins.

    Args:
        first_epoch: Epoch to begin with, counted from 0.
        epochs: Epoch to stop at.
    """

    first_epoch: int
    epochs: int
    run: RunDescription = field(default_factory=RunDescription)


@dataclass(frozen=True)
class EpochBegan:
    """An epoch begins, counted from 0."""

    epoch: int


@dataclass(frozen=True)
class WorkersJoined:
    """The number of workers that have joined has changed; told until the epoch has progressed."""

    epoch: int
    workers: int


@dataclass(frozen=True)
class WorkersAwaited:
    """Workers that train in step wait for some that were lost, until these are started again.

    Args:
        epoch: Counted from 0.
        ranks: The ranks that were lost; empty when all are back.
    """

    epoch: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EpochProgressed:
    """Some steps of an epoch are done (several a second, not one event per batch).

    Args:
        epoch: Counted from 0.
        batches: Steps of all workers that are done in it.
        batches_per_epoch: Steps of all workers in one epoch.
        metrics: Metrics of the rows trained so far in this epoch.
        rows_per_s: Rows a second of all workers, over the last seconds; None while not known.
        staleness: Mean commits between a pull and the commit that followed it.
    """

    epoch: int
    batches: int
    batches_per_epoch: int
    metrics: Metrics = field(default_factory=dict)
    rows_per_s: float | None = None
    staleness: float = 0.0


@dataclass(frozen=True)
class WorkerView:
    """One rank as the driver sees it.

    Args:
        rank: From 0.
        state: See :data:`WorkerState`.
        retries: Attempts before the present one.
        epoch, batch: How far it has come: the epoch from 0, and batches done in it.
        batches_per_epoch: Batches that it makes of its rows.
        rows: Rows that it has trained in all epochs.
        staleness, staleness_max: Mean and most commits of others between its pulls and commits.
        usage: What its present attempt has used so far; None before its first report.
        load: How busy its host is; None before its first heartbeat.
    """

    rank: int
    state: WorkerState
    retries: int = 0
    host: str = ""
    pid: int = 0
    epoch: int = 0
    batch: int = 0
    batches_per_epoch: int = 0
    rows: int = 0
    staleness: float = 0.0
    staleness_max: int = 0
    usage: Usage | None = None
    load: HostLoad | None = None


@dataclass(frozen=True)
class WorkersProgressed:
    """The state of each rank and its usage so far; about twice a second.

    Args:
        workers: In the order of their ranks.
        bytes_in, bytes_out: Of all frames that the coordinator took and sent.
        driver_load: How busy the driver's host is, without its GPUs; None where no kernel tells it.
        servers: Where several hold the weights or rows of tables: the work of each so far.
        driver_host: Name of the driver's host, as workers on it tell theirs.
    """

    workers: tuple[WorkerView, ...]
    bytes_in: int = 0
    bytes_out: int = 0
    driver_load: HostLoad | None = None
    servers: tuple[ServerUsage, ...] = ()
    driver_host: str = ""


@dataclass(frozen=True)
class LinesLogged:
    """The lines of ranks: messages of ``sparkdl.log_to_driver``, and warnings that Python logged.

    Args:
        lines: ``(rank, line)``, in the order in which the driver got them.
    """

    lines: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class WorkerTraced:
    """The phases of one rank from its start to its end."""

    rank: int
    spans: Spans


@dataclass(frozen=True)
class EpochEnded:
    """All workers have ended an epoch, or a callback stopped the training in the middle of it.

    Args:
        epoch, batches, batches_per_epoch, staleness: As those of :class:`EpochProgressed`.
        rows: Rows that were trained in it.
        metrics: Metrics of all its rows, validation metrics included.
        rows_per_s: Its rows over its time; None where the time is not known.
    """

    epoch: int
    batches: int
    batches_per_epoch: int
    rows: int = 0
    metrics: Metrics = field(default_factory=dict)
    rows_per_s: float | None = None
    staleness: float = 0.0


@dataclass(frozen=True)
class TrainingEnded:
    """A fit ended well."""

    epochs_done: int
    stopped: bool = False


@dataclass(frozen=True)
class TrainingFailed:
    """A fit ended with an error (its type and first line), or was interrupted."""

    error: str


@dataclass(frozen=True)
class SearchBegan:
    """A search of hyper-parameters begins.

    Args:
        search_id: A name that no other search and no fit has, in the order of time.
        metric: What is searched for.
        maximize: Whether larger is better.
        parameters: What the search was asked to do, by name: plain values.
    """

    search_id: str
    metric: str
    maximize: bool
    parameters: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialBegan:
    """A trial begins, or goes on.

    Args:
        trial: Its number, from 0.
        begin, end: The epochs that it has done, and those that it will have done.
        parent: The trial whose weights it starts from; None for its own.
    """

    trial: int
    params: dict[str, Json]
    begin: int
    end: int
    parent: int | None = None


@dataclass(frozen=True)
class TrialEpochEnded:
    """A trial has done an epoch, counted from 0; the metrics are of all its rows."""

    trial: int
    epoch: int
    metrics: Metrics


@dataclass(frozen=True)
class TrialEnded:
    """A trial was compared with others, has failed, or was stopped; it may go on later.

    Args:
        state: ``'waiting'`` (it may go on), ``'complete'`` (trained to the end), ``'failed'`` or
            ``'stopped'`` (the search ended before).
        metrics: As after the last epoch; empty if it failed.
        importances: Hyper-parameter -> the share of the metric's variance that it explains, over
            the trials so far (:func:`sparkdl.tune.study.importances`); empty while they are few.
    """

    trial: int
    epochs: int
    state: Literal["waiting", "complete", "failed", "stopped"]
    metrics: Metrics = field(default_factory=dict)
    error: str = ""
    importances: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchEnded:
    """A search ended; its trials are no longer trained.

    Args:
        best: The best trial; None if none has a score.
        error: The type and first line of the error that ended the search; empty if it ended well.
    """

    best: int | None
    value: float | None
    error: str = ""


EpochEvent = EpochBegan | EpochProgressed | EpochEnded
WorkerEvent = WorkersJoined | WorkersAwaited | WorkersProgressed | LinesLogged | WorkerTraced
FitEvent = TrainingBegan | EpochEvent | WorkerEvent | TrainingEnded | TrainingFailed
SearchEvent = SearchBegan | TrialBegan | TrialEpochEnded | TrialEnded | SearchEnded
Event = FitEvent | SearchEvent


class Sink(Protocol):
    """Takes the events of a fit: a progress bar, callbacks, a tracking service.

    It is called in the driver's thread, between two looks at the workers: it should not wait long.
    What it raises ends the fit (what a sink of the user raises: see
    :mod:`sparkdl.spark.fit.fitting`).
    """

    @property
    def wants_progress(self) -> bool:
        """Whether ``EpochProgressed`` and ``WorkersProgressed`` are of use to it: computing
        metrics several times a second costs time, so they are left out where no sink wants them."""

    def handle(self, event: Event) -> None:
        """Takes one event; a sink leaves out those that are of no use to it."""


def as_json(event: Event) -> dict[str, Json]:
    """The event's fields and its name, as values that ``json.dumps`` takes.

    A number that is not finite becomes None: JSON has none.

    >>> as_json(EpochBegan(2))
    {'event': 'epoch_began', 'epoch': 2}
    """
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    return {"event": name, **_fields(event)}


def _fields(
    value: Event | RunDescription | WorkerView | Usage | ServerUsage | HostLoad,
) -> dict[str, Json]:
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _plain(value: object) -> Json:
    if isinstance(value, Spans):
        spans: list[Json] = [[phase, start, seconds] for phase, start, seconds in value]
        return {"began_at": value.began_at, "spans": spans}
    if isinstance(value, (RunDescription, WorkerView, Usage, ServerUsage, HostLoad)):
        return _fields(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an event holds a {type(value).__name__}, which JSON does not have")


@dataclass(frozen=True)
class EpochProgress:
    """One epoch over all workers.

    Args:
        missing: Workers that have yet to finish it. Where all train in step, a worker that died
            is not waited for: the epoch ends without it.
        metrics: Sum of the workers' metric states; Keras metrics hold sums and counts, so the
            value of the sum is the row-weighted value over all workers.
        val_metrics: The same of the validation rows; empty before they are evaluated.
        seconds: How long it took, where the workers say so; None: the driver's own clock does.
    """

    missing: int = 0
    batches: int = 0
    rows: int = 0
    metrics: MetricState = field(default_factory=no_metrics)
    val_metrics: MetricState = field(default_factory=no_metrics)
    seconds: float | None = None


@dataclass(frozen=True)
class RunProgress:
    """A run over all workers.

    Args:
        staleness: As that of :class:`EpochProgressed`.
        workers: Each that has joined, by rank.
        bytes_in, bytes_out, servers: As those of :class:`WorkersProgressed`.
        awaited: Ranks that were lost, where the others train in step and wait for them.
    """

    epochs: dict[int, EpochProgress] = field(default_factory=dict)
    batches_per_epoch: int = 0
    rows: int = 0
    joined: int = 0
    failure: Failure | None = None
    staleness: float = 0.0
    workers: tuple[WorkerView, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0
    servers: tuple[ServerUsage, ...] = ()
    awaited: tuple[int, ...] = ()


def progress_of(status: Status, num_workers: int, *, in_step: bool) -> RunProgress:
    """The coordinator's status, as the driver's monitor takes it."""
    workers = status.workers
    epochs = {}
    for number, totals in status.epochs.items():
        awaited = set(range(num_workers))
        if in_step and totals.ended:
            # Nor is one awaited that waits to join: it is let in when the others go on.
            awaited = {rank for rank, worker in workers.items() if worker.member}
        batches = sum(
            w.batch if w.epoch == number else w.batches_per_epoch
            for w in workers.values()
            if w.epoch >= number
        )
        missing = len(awaited - set(totals.ended))
        epochs[number] = EpochProgress(
            missing, batches, totals.rows, totals.metrics, totals.val_metrics, totals.seconds
        )
    commits = sum(w.clock for w in workers.values())
    stale = sum(w.staleness_mean * w.clock for w in workers.values())
    return RunProgress(
        epochs=epochs,
        batches_per_epoch=sum(w.batches_per_epoch for w in workers.values()),
        rows=sum(w.rows for w in workers.values()),
        joined=len(workers),
        failure=status.failure,
        staleness=stale / commits if commits else 0.0,
        workers=tuple(
            _view(rank, worker, rank in status.waiting) for rank, worker in sorted(workers.items())
        ),
        bytes_in=status.bytes_in,
        bytes_out=status.bytes_out,
        awaited=_awaited(status) if in_step else (),
    )


def _awaited(status: Status) -> tuple[int, ...]:
    """Ranks that were lost; none before all have begun, and none once one is through."""
    workers = status.workers
    if not status.started or any(worker.finished for worker in workers.values()):
        return ()
    return tuple(sorted(rank for rank, worker in workers.items() if not worker.member))


def _view(rank: int, worker: WorkerStatus, waits: bool) -> WorkerView:
    state: WorkerState = "training"
    if worker.finished:
        state = "finished"
    elif not worker.alive:
        state = "lost"
    elif not worker.member:
        state = "joining"
    elif waits:
        state = "waiting"
    return WorkerView(
        rank, state, worker.retries, worker.host, worker.pid, worker.epoch, worker.batch,
        worker.batches_per_epoch, worker.rows, worker.staleness_mean, worker.staleness_max,
        worker.usage, worker.load,
    )  # fmt: skip
