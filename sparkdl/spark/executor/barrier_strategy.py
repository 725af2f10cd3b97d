"""``BarrierStrategy``: all-reduce among the tasks of a barrier stage, and their way to the driver.

Made on the driver; its methods run on executors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from sparkdl.collective.strategy import AllReduceStrategy, EarlyGathering, SessionMeeting
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.coordinator.session import open_session, report_failure
from sparkdl.failures import Failure, RankFailure
from sparkdl.training.syncing import RankIdentity
from sparkdl.transport.address import Endpoint
from sparkdl.weights import Layout


@dataclass(frozen=True)
class BarrierStrategy:
    """How the updates of a barrier stage's tasks travel; see
    :class:`sparkdl.training.syncing.Strategy`.

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
                session = stack.enter_context(
                    open_session(self.coordinator, rank=rank.rank, attempt=rank.attempt)
                )
                opened = self.gradients.open(SessionMeeting(session), layout, session)
            yield stack.enter_context(opened)

    def report_failure(self, rank: RankIdentity, error: BaseException) -> None:
        """Tells the coordinator that this rank failed for good.

        Raises:
            RankFailure: There is no coordinator. Spark ends the other ranks, and the driver finds
                the description of the failure in Spark's exception.
        """
        if self.coordinator is None:
            raise RankFailure(Failure.of(rank.rank, error)) from error
        report_failure(self.coordinator, rank.rank, rank.attempt, error)
