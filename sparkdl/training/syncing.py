"""The seam between the loop and the other workers: how updates travel.

A *synchronizer* exchanges what a worker's learner has learned. A *strategy* is what the driver
sends to each worker, to make its synchronizer from.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from sparkdl.files.run_state import RunState, StoredBytes
from sparkdl.training.changes import VariableChanges
from sparkdl.training.learning import BatchStack, Learner, SharedLearner
from sparkdl.training.reports import EpochReport, MetricState, Report
from sparkdl.weights import Layout

L = TypeVar("L", bound=Learner, contravariant=True)
"""The learners that a synchronizer can exchange the updates of."""


@dataclass(frozen=True)
class Start:
    """The begin of a worker: beyond zero if an earlier attempt at its task did part of the work.

    Args:
        epoch: Epoch to begin with.
        position: How much of that epoch is committed already: windows where all workers take them
            together, batches otherwise.
        windows_per_epoch: Windows that all workers take together (synchronous training), or None
            where each worker takes as many as it has.
        done: All work of this rank is committed already.
        with_optimizer: The learner has the optimizer state of that point, too.
    """

    epoch: int = 0
    position: int = 0
    windows_per_epoch: int | None = None
    done: bool = False
    with_optimizer: bool = False


@dataclass(frozen=True)
class Orders:
    """The driver's orders to a worker.

    Args:
        stopped: All workers stop.
        learning_rate: A learning rate that the driver has set since the start, or None.
    """

    stopped: bool = False
    learning_rate: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A synchronizer's facts about the training when it has ended.

    Args:
        transport: Name of the transport or communicator, e.g. ``'shm'`` or ``'horovod'``.
        refused: Updates of this worker that were refused because they were not finite.
        counted: The part of this worker's changes that counted, a mean over its exchanges: below 1
            where a rule adds up the changes of all workers and they were too much together.
        unreported: Epoch -> its final report, where there is no connection to the driver.
        state: What the run keeps of this worker and could not be sent to the driver; else None.
    """

    transport: str
    refused: int = 0
    counted: float = 1.0
    unreported: Mapping[int, EpochReport] = field(default_factory=dict)
    state: RunState | None = None


class Synchronizer(Protocol[L]):
    """Exchanges what one worker has learned with the others, through a server or all-reduce."""

    def start(self, learner: L, rows: int, batches: int, windows: int) -> Start:
        """Joins the run and sets the learner's weights.

        Args:
            learner: This worker's model.
            rows: Rows that this worker has per epoch.
            batches: Batches that it has per epoch.
            windows: Exchanges that it would make per epoch.
        """

    def train(self, learner: L, stack: BatchStack | None, report: Report) -> None:
        """Trains the batches of ``stack``, then exchanges; None exchanges without a batch."""

    def train_on(self, learner: L, stack: BatchStack, report: Report) -> None:
        """Trains a stack after which the window goes on, so that no exchange is due yet."""

    def weights_of_run(self, learner: L, last: bool) -> AbstractContextManager[None]:
        """Within, ``learner`` has the weights of the run, so that their metrics are evaluated.

        Args:
            learner: Has trained its batches of an epoch.
            last: The weights are those that the driver takes: no epoch follows, or its callbacks
                look at them. Waits until the other workers that take part have trained their
                batches, too.
        """

    def end_epoch(
        self,
        learner: L,
        epoch: int,
        metrics: MetricState,
        validation: MetricState | None,
        wait: bool,
    ) -> None:
        """Reports an epoch's metrics; with ``wait``, returns when the driver allows it."""

    def keep_state(self, learner: L, epoch: int) -> None:
        """Sends the driver what a checkpoint after ``epoch`` epochs needs from this worker."""

    def finish(self, learner: L, epoch: int) -> None:
        """Tells the others that this worker has trained all of its batches, or was stopped.

        What it has trained since the last exchange is exchanged first; then what the run keeps of
        this worker after ``epoch`` epochs goes to the driver, if there is a connection to it.
        """

    @property
    def every_batch(self) -> bool:
        """Whether ``train`` exchanges at every batch of a stack; a batch is a window then."""

    @property
    def cuts_stacks(self) -> bool:
        """Whether ``train`` can exchange after each ``Report.window`` batches of a stack."""

    @property
    def orders(self) -> Orders:
        """The driver's orders, as of a step at which this worker may follow."""

    def take_changes(self, learner: L) -> None:
        """Gives ``learner`` what the driver's callbacks wrote to the model, if it is time.

        Where the workers train in step, it is for all of them at the same step.
        """

    def outcome(self, learner: L, epoch: int) -> Outcome:
        """The facts about the training, after :meth:`finish`.

        Args:
            learner: This worker's.
            epoch: Epochs that are done.
        """


class RankIdentity(Protocol):
    """Which of the run's processes this is, as the launcher numbers them."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def attempt(self) -> int:
        """A number that no other attempt at the work of this rank has."""

    def all_gather(self, text: str) -> list[str]:
        """Every rank's text in rank order. Only where all ranks are launched together."""


class Strategy(Protocol):
    """How updates travel, made on the driver, pickled, and opened by each rank's process."""

    @property
    def independent(self) -> bool:
        """Whether the ranks' models never meet, so that each returns its own."""

    def meet(self, rank: RankIdentity) -> AbstractContextManager[RankIdentity]:
        """Begins to meet the other ranks; called only where all ranks are launched together.

        :meth:`open` takes what the context manager gives. It is entered before the framework
        starts, so that ranks wait for each other meanwhile.
        """

    def open(
        self, rank: RankIdentity, layout: Layout
    ) -> AbstractContextManager[Synchronizer[SharedLearner]]:
        """The connected synchronizer of this rank; leaving it closes the connection.

        Raises:
            TransportError: A server or another rank cannot be reached.
            ModelError: ``layout`` is not that of the driver's model.
        """

    def report_failure(self, rank: RankIdentity, error: BaseException) -> None:
        """Tells the other ranks and the driver that this rank failed and is not tried again."""


class StepSynchronizer(Protocol):
    """The steps and exchanges of one rank; all ranks take the same number of steps.

    There are two in :mod:`sparkdl.collective`: ``AllReduceGradientSynchronizer`` (the mean of the
    gradients at each step) and ``RuleSynchronizer`` (any other rule). What has a body here is that
    of ranks that are equal after every step, with no state beside the learner's.
    """

    stop_wanted: bool
    """Set by the caller: the driver has an order for this rank: to stop, or to take changes."""
    stop_agreed: bool
    """Whether the driver has an order for any rank; all ranks see it at the same step. The caller
    takes it back when the ranks have agreed on what the order is."""

    def start(
        self, learner: SharedLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        """Gives every rank the root's weights and optimizer state.

        Args:
            root: The rank whose state all take.
            scale: Most rows per batch of any rank.
            steps: Steps of an epoch, the most of any rank.
        """

    def train(self, learner: SharedLearner, stack: BatchStack) -> None:
        """Takes a step for each batch of ``stack``, with the exchanges that fall among them."""

    def skip(self, learner: SharedLearner) -> None:
        """Takes part in one step of the other ranks; this rank has no batch for it."""

    @property
    def ranks_are_equal(self) -> bool:
        """Whether all ranks have the same model after each step, those without a batch, too."""
        return True

    def evaluating(self) -> AbstractContextManager[None]:
        """Within, the learner evaluates this rank's rows with the weights of the run."""
        return nullcontext()

    def end_epoch(self, learner: SharedLearner) -> None:
        """Called after an epoch has been evaluated and reported."""
        return

    def save_state(self, learner: SharedLearner) -> bytes | StoredBytes:
        """The state to go on from beside the learner's own; a collective call."""
        return b""

    def take_changes(self, learner: SharedLearner, changes: VariableChanges) -> None:
        """The learner was given ``changes``, on all ranks at this step.

        Raises:
            ConfigError: They are of variables that the rule keeps by itself.
        """

    def end_run(self, learner: SharedLearner) -> bool:
        """Exchanges what is left; the learner then has the run's model.

        Returns:
            Whether that may be another than at the end of the last epoch.
        """
        return False

    def close(self) -> None:
        """Ends threads and groups."""
        return
