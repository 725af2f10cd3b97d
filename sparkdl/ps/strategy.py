"""How the modes with a server exchange updates: a picklable strategy, and a worker's side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.coordinator.session import open_session, report_failure
from sparkdl.files.run_state import RunState
from sparkdl.ps.client import Client, Progress, connect
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.round_synchronizer import RoundSynchronizer
from sparkdl.ps.shards.client import connect_shards
from sparkdl.ps.synchronizer import ServerGradientSynchronizer, Way, WindowSynchronizer
from sparkdl.rules.rule import Rule
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.learning import MAX_STACK, BatchStack, SharedLearner
from sparkdl.training.reports import EpochReport, MetricState, Report
from sparkdl.training.syncing import Orders, Outcome, RankIdentity, Start
from sparkdl.transport.address import Endpoint
from sparkdl.weights import NO_VALUES, Layout


@dataclass(frozen=True)
class ServerStrategy:
    """How updates travel through a parameter server; made on the driver, sent to the workers.

    Args:
        endpoint: Endpoint of the server, or of the coordinator where the center lies on shards.
        rule: Its worker half runs here.
        overlap: Exchange one window while the next is trained; None where it pays, see
            :class:`sparkdl.ps.synchronizer.WindowSynchronizer`.
        compression: The server's; None sends float32.
        on_nan: See :class:`sparkdl.training.finite.FiniteCheck`.
        at_once: Workers that train at the same time; 0: all of the run.
        shards: The servers that hold the center, in order; none: that of ``endpoint``.
        with_tables: Whether layers of the model have rows in tables on the servers.
    """

    endpoint: Endpoint
    layout: Layout
    rule: Rule
    overlap: bool | None = None
    compression: Compression | None = None
    on_nan: str = "raise"
    at_once: int = 0
    shards: tuple[Endpoint, ...] = ()
    with_tables: bool = False

    @property
    def independent(self) -> bool:
        """Whether each rank trains a model of its own, which is a result of its own."""
        return self.rule.independent

    @contextlib.contextmanager
    def meet(self, rank: RankIdentity) -> Iterator[RankIdentity]:
        """Nothing to begin: workers meet at the server."""
        yield rank

    @contextlib.contextmanager
    def open(self, rank: RankIdentity, layout: Layout) -> Iterator[ServerSynchronizer]:
        """Connects; a worker that leaves before it has finished is marked dead at the server.

        Raises:
            TransportError: The server cannot be reached.
            ModelError: It holds another model; no other try would mend that.
        """
        self.layout.require(layout, "the server's")
        with self._connect(rank, layout) as client:
            check = FiniteCheck(self.on_nan, layout.trained_size)
            yield ServerSynchronizer(
                self.rule, client, layout, self.overlap, check, self.at_once,
                with_tables=self.with_tables,
            )  # fmt: skip

    def _connect(self, rank: RankIdentity, layout: Layout) -> Client:
        if not self.shards:
            return connect(
                self.endpoint, rank=rank.rank, attempt=rank.attempt, layout=layout,
                compression=self.compression,
            )  # fmt: skip
        session = open_session(
            self.endpoint, rank=rank.rank, attempt=rank.attempt, limits=limits_of(NO_VALUES)
        )
        return connect_shards(session, self.shards, layout, self.rule, compression=self.compression)

    def report_failure(self, rank: RankIdentity, error: BaseException) -> None:
        """Tells the server that this worker failed for good, so that no other waits for it."""
        limits = limits_of(NO_VALUES if self.shards else self.layout, self.compression)
        report_failure(self.endpoint, rank.rank, rank.attempt, error, limits)


def _beside_weights(learner: SharedLearner, epoch: int) -> RunState:
    """The state of a worker without its weights, which the server has."""
    return RunState(epoch, optimizer=learner.optimizer.state(), carried=learner.carried_state())


class ServerSynchronizer:
    """A worker's side of the server; see :class:`sparkdl.training.syncing.Synchronizer`.

    It joins the run, takes the driver's orders and reports; its :class:`Way` trains and exchanges.

    Workers that train in rounds follow the driver's orders after each
    :data:`~sparkdl.training.learning.MAX_STACK` rounds and at the end of an epoch: so all of them
    follow at the same round, although a compiled call makes many rounds.
    """

    def __init__(
        self,
        rule: Rule,
        client: Client,
        layout: Layout,
        overlap: bool | None,
        check: FiniteCheck | None = None,
        at_once: int = 0,
        *,
        with_tables: bool = False,
    ) -> None:
        self._check = check or FiniteCheck("ignore", layout.trained_size)
        self._rule, self._client, self._session = rule, client, client.session
        if overlap is None and client.transport == "shm":
            overlap = False  # no network to hide: an exchange costs the processors that train
        self._way: Way
        if rule.payload == "delta":
            self._way = WindowSynchronizer(
                rule, client, layout, overlap=overlap, check=self._check, at_once=at_once,
                with_tables=with_tables,
            )  # fmt: skip
        elif rule.blocking:  # a rule of a user's own sees the whole gradient
            self._way = RoundSynchronizer(
                client, layout, self._check, takes_slices=rule.replies_mean, with_tables=with_tables
            )
        else:
            self._way = ServerGradientSynchronizer(client, layout, self._check)
        self._epoch = -1
        self._epoch_rows = 0
        self.orders = Orders()
        """The orders that the server has told of last."""
        self._changes_due = 0
        self._changes_taken = 0

    def start(self, learner: SharedLearner, rows: int, batches: int, windows: int) -> Start:
        """Joins the run and takes the weights to start from.

        Workers that train in step count windows (rounds), which all of them take together.
        """
        in_step = self._rule.blocking
        welcome = self._client.join(rows=rows, batches_per_epoch=windows if in_step else batches)
        self._take_orders()
        self.take_changes(learner)  # before the weights, which are newer
        with_optimizer = not welcome.done and self._way.start(learner, welcome.epoch, welcome.batch)
        if welcome.source != "state":  # else the others have yet to follow what they were told last
            self._take_orders()
        return Start(
            epoch=welcome.epoch, position=welcome.batch,
            windows_per_epoch=welcome.steps_per_epoch if in_step else None, done=welcome.done,
            with_optimizer=with_optimizer,
        )  # fmt: skip

    def train(self, learner: SharedLearner, stack: BatchStack | None, report: Report) -> None:
        """Trains a stack of batches and exchanges; None takes part with nothing."""
        progress = self._progress_of(report)
        self._tell(report)
        self._way.take(learner, stack, report.window, progress)
        self._epoch_rows += report.rows
        if report.windows_done % MAX_STACK == 0 or not self.every_batch:
            self._take_orders()

    def train_on(self, learner: SharedLearner, stack: BatchStack, report: Report) -> None:
        """Trains batches whose exchange comes later."""
        self._way.take_open(learner, stack, self._progress_of(report))
        self._tell(report)
        self._take_orders()

    def _progress_of(self, report: Report) -> Progress:
        return Progress(
            epoch=report.epoch,
            batch=report.windows_done if self._rule.blocking else report.batches_done,
            batches=report.batches, rows=report.rows, learning_rate=report.learning_rate,
        )  # fmt: skip

    def _tell(self, report: Report) -> None:
        """Sends the driver the metrics of the epoch so far, if the loop has taken them now."""
        if report.epoch != self._epoch:
            self._epoch, self._epoch_rows = report.epoch, 0
        if report.metrics is not None:
            self._session.report(EpochReport(report.epoch, self._epoch_rows, report.metrics))

    def weights_of_run(self, learner: SharedLearner, last: bool) -> AbstractContextManager[None]:
        """The server's weights; in step with gradients, and for an ensemble, the worker's own."""
        return self._way.weights_of_run(learner, last)

    def end_epoch(
        self,
        learner: SharedLearner,
        epoch: int,
        metrics: MetricState,
        validation: MetricState | None,
        wait: bool,
    ) -> None:
        """Reports the epoch's metrics; where workers own the weights, one has stored them first."""
        self._way.end_epoch(learner, epoch)
        report = EpochReport(
            epoch, self._epoch_rows if epoch == self._epoch else 0, metrics, ended=True,
            val_metrics=np.empty(0) if validation is None else validation,
        )  # fmt: skip
        self._session.report(report, wait=wait)
        self._take_orders()

    def _take_orders(self) -> None:
        """From now on the loop is told what the server has told last."""
        session = self._session
        self.orders = Orders(session.stopped, session.learning_rate)
        self._changes_due = session.changes

    def take_changes(self, learner: SharedLearner) -> None:
        """Gives ``learner`` what the server has told of last."""
        due = self._changes_due
        if due == self._changes_taken:
            return
        self._way.drain(learner)
        self._way.take_changes(learner, self._session.take_changes(due))
        self._changes_taken = due

    def keep_state(self, learner: SharedLearner, epoch: int) -> None:
        """Leaves the optimizer state for a checkpoint: of one worker in step, else of rank 0.

        Where workers own the weights, it is the worker that stores these, and before it does.
        """
        if self._way.keeps_state(self._holds_state, epoch):
            self._way.drain(learner)
            self._session.keep(_beside_weights(learner, epoch).pieces(), epoch)

    def finish(self, learner: SharedLearner, epoch: int) -> None:
        """Says that this worker is done; what it trained since an exchange, or snapshot, counts.

        Before that it leaves with the server what the run keeps of it: the optimizer state, or the
        model of its own.
        """
        self._way.end_run(learner)
        if self._rule.independent:
            self._session.keep(RunState.of(learner, epoch).pieces(), epoch, own=True)
        elif self._holds_state:
            self._session.keep(_beside_weights(learner, epoch).pieces(), epoch)
        self._client.finish()

    def outcome(self, learner: SharedLearner, epoch: int) -> Outcome:
        """The server has all that the run keeps."""
        return Outcome(self._client.transport, self._check.refused, self._way.counted)

    @property
    def _holds_state(self) -> bool:
        """Whether the run keeps this worker's optimizer state.

        In step all workers have the same state; otherwise each has its own, and rank 0's is kept.
        """
        return self._session.lead if self._rule.blocking else self._session.rank == 0

    @property
    def every_batch(self) -> bool:
        """Whether each batch is a round; otherwise a window's exchange follows its last batch."""
        return self._way.every_batch

    @property
    def cuts_stacks(self) -> bool:
        """Whether an exchange may happen inside a compiled call: no worker waits for this one, and
        the exchange changes the weights only."""
        return self._way.cuts_stacks
