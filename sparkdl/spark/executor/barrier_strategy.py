"""``BarrierStrategy``: all-reduce among the tasks of a barrier stage, and their way to the driver.

Made on the driver; its methods run on executors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sparkdl.collective.strategy import AllReduceStrategy, EarlyGathering
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.coordinator.session import Session, open_session, report_failure
from sparkdl.coordinator.telemetry import EpochReport
from sparkdl.launch.failures import FailureDescription, RankFailure
from sparkdl.protocols import RankIdentity
from sparkdl.transport.address import Endpoint
from sparkdl.weights import Layout

_LEAVING_S = 1.5
"""Until every rank has left the stage's ``allGather``, which looks for its answer once a second:
Spark 4.3 ends the executor of a task that waits there when its stage is ended."""


@dataclass(frozen=True)
class BarrierStrategy:
    """How the updates of a barrier stage's tasks travel; see :class:`sparkdl.protocols.Strategy`.

    Args:
        gradients: How gradients travel among the ranks.
        coordinator: At the driver; None where ranks cannot reach it (Spark Connect).
    """

    gradients: AllReduceStrategy
    coordinator: Endpoint | None
    independent: ClassVar[bool] = False

    @contextlib.contextmanager
    def meet(self, rank: RankIdentity) -> Iterator[RankIdentity]:
        """Begins to meet the other ranks, before this one imports anything or reads its rows.

        With a coordinator there is nothing to begin: the ranks meet there in :meth:`open`, which is
        quick, and which names the ranks that are missing.
        """
        if self.coordinator is not None:
            yield rank
            return
        with contextlib.closing(EarlyGathering(rank, self.gradients.connector(rank.rank))) as early:
            yield early

    @contextlib.contextmanager
    def open(self, rank: RankIdentity, layout: Layout) -> Iterator[AllReduceSynchronizer]:
        """Connects to the coordinator, then all ranks with each other."""
        with contextlib.ExitStack() as stack:
            if self.coordinator is None:
                opened = self.gradients.open(rank, layout)
            else:
                session = open_session(self.coordinator, rank=rank.rank, attempt=rank.attempt)
                control = SessionControl(stack.enter_context(session))
                opened = self.gradients.open(control, layout, control)
            yield stack.enter_context(opened)

    def report_failure(self, rank: RankIdentity, error: BaseException) -> None:
        """Tells the coordinator that this rank failed for good.

        Raises:
            RankFailure: There is no coordinator: Spark ends the other ranks, and carries the
                description to the driver.
        """
        if self.coordinator is None:
            time.sleep(_LEAVING_S)
            raise RankFailure(FailureDescription.of(rank.rank, error)) from error
        report_failure(self.coordinator, rank.rank, rank.attempt, error)


class SessionControl:
    """A rank's session with the coordinator; see :class:`sparkdl.collective.control.Control`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rank, self.attempt = session.rank, session.attempt
        self.unreported: dict[int, dict[str, Any]] = {}

    def all_gather(self, text: str) -> list[str]:
        """Every rank's text, by way of the coordinator: a barrier's ``allGather`` takes a second.

        Raises:
            WaitTimeoutError: Some ranks did not come in time; they are named.
        """
        return self._session.meet(text)

    def join(self, rows: int, batches: int) -> None:
        """Tells what this worker has."""
        self._session.join(rows=rows, batches_per_epoch=batches)

    def report(self, meta: dict[str, Any], *, wait: bool, batch: int, rows: int) -> None:
        """Sends metrics of an epoch; with ``wait``, returns when the driver releases it."""
        report = EpochReport(
            meta["epoch"],
            meta["rows"],
            np.asarray(meta["metrics"], np.float64),
            ended=bool(meta.get("ended")),
            val_metrics=np.asarray(meta.get("val_metrics", ()), np.float64),
            batches_done=batch,
            rows_done=rows,
        )
        self._session.report(report, wait=wait)

    def keep_state(self, state: bytes, epoch: int) -> None:
        """Leaves the state after ``epoch`` epochs with the driver."""
        self._session.keep(state, epoch)

    def finish(self) -> None:
        """Says that this worker is done."""
        self._session.finish()

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked all ranks to stop."""
        return self._session.stopped

    @property
    def learning_rate(self) -> float | None:
        """A learning rate that the driver has set, or None."""
        return self._session.learning_rate
