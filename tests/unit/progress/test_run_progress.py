"""What the coordinator knows of a run, put together for the driver."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparkdl.coordinator.telemetry import EpochTotals, Status, WorkerStatus
from sparkdl.failures import Failure
from sparkdl.progress.events import progress_of
from sparkdl.training.phases import Usage

WORKER = WorkerStatus(
    alive=True, attempt=0, epoch=0, batch=3, batches=3, rows=12, finished=False, clock=2,
    commits=2, batches_per_epoch=10, host="here", pid=1, staleness_mean=1.0, staleness_max=1,
    member=True,
)  # fmt: skip


def status(*workers: WorkerStatus) -> Status:
    """A run of which rank 0 has ended the first epoch."""
    totals = EpochTotals(24, 0, np.array([1.0, 2.0]), np.empty(0), (0,))
    return Status(workers=dict(enumerate(workers)), epochs={0: totals})


def test_an_epoch_of_workers_in_step_ends_without_a_dead_one() -> None:
    told = status(WORKER, replace(WORKER, alive=False, member=False))
    assert progress_of(told, 2, in_step=True).epochs[0].missing == 0
    assert progress_of(told, 2, in_step=False).epochs[0].missing == 1


def test_an_epoch_of_workers_in_step_ends_without_one_that_waits_to_join() -> None:
    """The others wait for the end of the epoch, and it waits for their next round."""
    told = status(WORKER, replace(WORKER, attempt=1, member=False))
    assert progress_of(told, 2, in_step=True).epochs[0].missing == 0


def test_lost_workers_are_awaited_by_those_in_step() -> None:
    lost, joining = replace(WORKER, alive=False, member=False), replace(WORKER, member=False)
    told = replace(status(WORKER, lost, joining), started=True)
    assert progress_of(told, 3, in_step=True).awaited == (1, 2)
    assert progress_of(told, 3, in_step=False).awaited == ()
    assert progress_of(replace(told, started=False), 3, in_step=True).awaited == ()
    through = replace(status(replace(WORKER, finished=True, member=False), lost), started=True)
    assert progress_of(through, 2, in_step=True).awaited == ()


def test_progress_counts_the_batches_of_all_workers() -> None:
    progress = progress_of(status(replace(WORKER, epoch=1, batch=2), WORKER), 2, in_step=False)
    assert progress.epochs[0].batches == 10 + 3
    assert progress.batches_per_epoch == 20
    assert (progress.rows, progress.joined, progress.epochs[0].rows) == (24, 2, 24)
    assert progress.staleness == 1.0


def test_progress_tells_the_failure() -> None:
    failure = Failure(1, "ValueError: bad", "trace")
    told = replace(status(WORKER), failure=failure)
    assert progress_of(told, 2, in_step=False).failure == failure
    assert progress_of(status(WORKER), 2, in_step=False).failure is None


def test_each_worker_has_a_state() -> None:
    usage = Usage({"compute": 1.0}, 2.0, 3)
    told = status(
        replace(WORKER, usage=usage, retries=1), replace(WORKER, member=False),
        WORKER, replace(WORKER, finished=True, alive=False, member=False),
        replace(WORKER, alive=False, member=False),
    )  # fmt: skip
    views = progress_of(replace(told, waiting={2: "round"}), 5, in_step=False).workers
    states = ["training", "joining", "waiting", "finished", "lost"]
    assert [view.state for view in views] == states
    assert [view.rank for view in views] == [0, 1, 2, 3, 4]
    assert (views[0].usage, views[0].retries, views[0].rows) == (usage, 1, 12)
