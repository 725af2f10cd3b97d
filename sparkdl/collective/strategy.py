"""How the ranks of ``mode='allreduce'`` connect, and how a barrier stage's tasks do.

Strategies are made on the driver; their methods run on executors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

from sparkdl.collective.communicator import (
    Communicator,
    Connector,
    ConnectorOptions,
    Maker,
    Member,
    make_communicator,
)
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.rule_synchronizer import RuleSynchronizer
from sparkdl.collective.rules import ExchangeRule
from sparkdl.collective.synchronizer import AllReduceSynchronizer, Control
from sparkdl.collective.table_exchange import TableSteps
from sparkdl.coordinator.session import open_session, report_failure
from sparkdl.failures import Failure, RankFailure
from sparkdl.tables.checkpoints import TableCheckpoints
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.syncing import RankIdentity, StepSynchronizer
from sparkdl.transport.address import Endpoint
from sparkdl.weights import Layout


class EarlyGathering:
    """A meeting that exchanges the connectors' texts before their result is needed.

    It begins before anything that may hang (reading rows, starting the framework). Then a rank that
    hangs there has already told where it listens, and the others' attempt to connect names it.

    Args:
        meeting: The launcher's.
        connector: Connector of the communicator to be; prepared here.
    """

    def __init__(self, meeting: RankIdentity, connector: Connector) -> None:
        self.rank, self.attempt, self.connector = meeting.rank, meeting.attempt, connector
        self._texts: Future[list[str]] = Future()
        own_text = connector.prepare().to_json()

        def work() -> None:
            try:
                self._texts.set_result(meeting.all_gather(own_text))
            except BaseException as error:
                self._texts.set_exception(error)

        threading.Thread(target=work, name="sparkdl-early", daemon=True).start()

    def all_gather(self, text: str) -> list[str]:
        """The texts of all ranks' connectors; ``text`` is not sent."""
        return self._texts.result()

    def close(self) -> None:
        """Closes the connector's sockets, unless a communicator uses them."""
        self.connector.close()


@dataclass(frozen=True)
class AllReduceStrategy:
    """How updates travel without a server; made on the driver, pickled, opened by each rank.

    Args:
        token: The run's secret; the same on all ranks.
        wire: The type in which gradients are sent; see :class:`AllReduceGradientSynchronizer`.
        rule: How the ranks' updates are joined; None: the mean of the gradients, at every step.
        window: Steps between two exchanges of the rule.
        rule_state: State of the rule in an earlier run; see :class:`RuleSynchronizer`.
        on_nan: See :class:`sparkdl.training.finite.FiniteCheck`.
        tables: Folder for the rows of a model with tables; None for a model without.
    """

    token: bytes = field(repr=False)
    layout: Layout
    communicator: str | Maker = "auto"
    options: ConnectorOptions = field(default_factory=ConnectorOptions)
    wire: str | None = None
    rule: ExchangeRule | None = None
    window: int = 1
    rule_state: bytes = b""
    on_nan: str = "raise"
    tables: str | None = None

    @contextlib.contextmanager
    def open(
        self, meeting: RankIdentity, layout: Layout, control: Control | None = None
    ) -> Iterator[AllReduceSynchronizer]:
        """Connects all ranks. Leaving the context, by an error too, closes the communicator, so
        that no other rank goes on waiting for this one.

        Raises:
            ModelError: This rank's model is not the driver's.
            TransportError: A rank cannot be reached.
        """
        self.layout.require(layout, "the driver's")
        check = FiniteCheck(self.on_nan, layout.trained_size)
        with (
            self.connect(meeting) as communicator,
            contextlib.closing(self._steps(communicator, layout, check)) as steps,
        ):
            yield AllReduceSynchronizer(communicator, layout, control, steps=steps, check=check)

    def _steps(
        self, communicator: Communicator, layout: Layout, check: FiniteCheck
    ) -> StepSynchronizer:
        if self.rule is None:
            dense = AllReduceGradientSynchronizer(communicator, layout, wire=self.wire, check=check)
            if self.tables is None:
                return dense
            return TableSteps(
                dense, communicator, TableCheckpoints(self.tables), self.rule_state,
                ignores_nan=self.on_nan == "ignore",
            )  # fmt: skip
        return RuleSynchronizer(
            communicator, layout, self.rule, self.window, wire=self.wire, state=self.rule_state,
            check=check,
        )  # fmt: skip

    def connector(self, rank: int) -> Connector:
        """The connector of a rank's communicator."""
        options: ConnectorOptions = {**self.options}
        if self.communicator == "auto":
            options["calls_horovod"] = False
        return make_communicator(self.communicator, rank=rank, **options)

    @contextlib.contextmanager
    def connect(self, meeting: RankIdentity) -> Iterator[Communicator]:
        """A communicator among all ranks, closed at the end."""
        prepared = meeting.connector if isinstance(meeting, EarlyGathering) else None
        connector = prepared or self.connector(meeting.rank)
        with contextlib.closing(connector):
            own_text = "" if prepared else connector.prepare().to_json()
            members = [Member.from_json(text) for text in meeting.all_gather(own_text)]
            communicator = connector.connect(members, self.token)
        with contextlib.closing(communicator):
            yield communicator


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
                opened = self.gradients.open(session, layout, session)
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
