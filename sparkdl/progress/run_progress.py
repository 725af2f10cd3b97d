"""The reports of a run's workers, put together: the numbers behind History and progress bar."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdl.coordinator.telemetry import Status, WorkerStatus
from sparkdl.failures import Failure
from sparkdl.progress.events import WorkerState, WorkerView
from sparkdl.training.phases import ServerUsage
from sparkdl.training.reports import MetricState, no_metrics


@dataclass(frozen=True)
class EpochProgress:
    """One epoch over all workers.

    Args:
        missing: Workers that have yet to finish it. Where all train in step, a worker that died
            is not waited for: the epoch ends without it.
        metrics: Sum of the workers' metric states; Keras metrics hold sums and counts, so the
            value of the sum is the row-weighted value over all workers.
        val_metrics: The same of the validation rows; empty before they are evaluated.
        seconds: How long it took, where the workers say so; else None, and the driver's own
            clock says it.
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
        staleness: Mean commits between a pull and the commit that followed it.
        workers: Each that has joined, by rank.
        bytes_in, bytes_out: Of all frames that the coordinator took and sent.
        servers: The work of each of several servers so far.
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
        epochs[number] = EpochProgress(
            missing=len(awaited - set(totals.ended)),
            batches=batches,
            rows=totals.rows,
            metrics=totals.metrics,
            val_metrics=totals.val_metrics,
            seconds=totals.seconds,
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
