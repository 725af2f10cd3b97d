"""The synchronizer of :mod:`sparkdl.worker` in ``mode='allreduce'``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.coordinator.session import Session
from sparkdl.files.run_state import Blob, RunState, StoredBytes
from sparkdl.training.changes import VariableChanges
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.learning import MAX_STACK, BatchStack, SharedLearner
from sparkdl.training.phases import current_clock
from sparkdl.training.reports import EpochReport, MetricState, Report
from sparkdl.training.syncing import Orders, Outcome, Start, StepSynchronizer
from sparkdl.weights import Layout


class NoControl:
    """Stands for a connection to the driver where there is none (Spark Connect).

    It keeps each epoch's final metrics, which the rank returns with its result.
    """

    stopped = False
    learning_rate: float | None = None
    changes = 0

    def __init__(self) -> None:
        self.unreported: dict[int, EpochReport] = {}

    def join(self, *, rows: int, batches_per_epoch: int) -> None:
        """Does nothing."""

    def report(self, report: EpochReport, *, wait: bool = False) -> None:
        """Keeps the report of an epoch that has ended."""
        if report.ended:
            self.unreported[report.epoch] = report

    def keep(self, state: Blob, epoch: int) -> None:
        """Does nothing."""

    def take_changes(self, count: int) -> list[VariableChanges]:
        """There are none."""
        return []

    def finish(self) -> None:
        """Does nothing."""


Control = Session | NoControl
"""A rank's connection to the driver, or what stands for it."""


class AllReduceSynchronizer:
    """The :class:`~sparkdl.training.syncing.Synchronizer` of training without a server.

    The ranks agree on the number of steps of an epoch at the start; on stopping and on what the
    driver's callbacks wrote, after each :data:`~sparkdl.training.learning.MAX_STACK` steps and at
    the end of an epoch; and on the learning rate at the end of an epoch. So all ranks always do
    the same.

    Args:
        control: This rank's connection to the driver; None: there is none.
        steps: What a step is; None for an :class:`AllReduceGradientSynchronizer`.
    """

    every_batch = True
    cuts_stacks = False

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        control: Control | None = None,
        *,
        steps: StepSynchronizer | None = None,
        check: FiniteCheck | None = None,
    ) -> None:
        self._check = check or FiniteCheck("ignore", layout.trained_size)
        self._clock = current_clock()
        self._communicator = communicator
        self._unconnected = NoControl()
        self._control: Control = control or self._unconnected
        self._steps: StepSynchronizer = steps or AllReduceGradientSynchronizer(
            communicator, layout, check=self._check
        )
        self._root = 0
        self._uneven = False  # some ranks have fewer batches than others
        self.rule_state: bytes | StoredBytes = b""
        self._epoch = -1
        self._kept = -1  # epochs done in the state that was left with the driver last
        self._epoch_rows = self._epoch_batches = self._rows = 0
        self._steps_done = 0
        self._stopped = False
        self._learning_rate: float | None = None
        self._changes = self._changes_taken = 0

    def start(self, learner: SharedLearner, rows: int, batches: int, windows: int) -> Start:
        """Agrees on the steps of an epoch, and takes the weights of the root.

        The root is the first rank with the most rows: one without rows has no optimizer state.
        """
        self._control.join(rows=rows, batches_per_epoch=batches)
        mine = np.array([windows, rows, -(-rows // max(batches, 1))], np.int64)
        gathered = np.stack(self._communicator.all_gather(mine))
        steps, most_rows, batch_rows = (int(v) for v in gathered.max(axis=0))
        self._root = int(gathered[:, 1].argmax())
        self._uneven = bool(gathered[:, 0].min() < steps)
        self._steps.start(learner, self._root, scale=float(max(1, batch_rows)), steps=steps)
        return Start(windows_per_epoch=steps, done=most_rows == 0)

    def train(self, learner: SharedLearner, stack: BatchStack | None, report: Report) -> None:
        """The steps of all ranks for a stack of batches; None is one step without a batch."""
        if report.epoch != self._epoch:
            self._epoch, self._epoch_rows, self._steps_done = report.epoch, 0, 0
        if stack is None:
            self._steps.skip(learner)
            self._steps_done += 1
        else:
            self._steps.train(learner, stack)
            self._steps_done += stack.num_batches
        self._epoch_rows += report.rows
        self._epoch_batches = report.batches_done
        self._rows += report.rows
        if report.metrics is not None:
            self._control.report(
                EpochReport(
                    report.epoch,
                    self._epoch_rows,
                    report.metrics,
                    batches_done=self._epoch_batches,
                    rows_done=self._rows,
                )
            )
        if self._steps.stop_agreed and self._steps_done % MAX_STACK == 0:
            self._agree()
        due = self._control.changes > self._changes
        self._steps.stop_wanted = self._control.stopped or due

    def train_on(self, learner: SharedLearner, stack: BatchStack, report: Report) -> None:
        """The same as :meth:`train`: here every batch may end with an exchange."""
        self.train(learner, stack, report)

    @contextlib.contextmanager
    def weights_of_run(self, learner: SharedLearner, last: bool) -> Iterator[None]:
        """Nothing to do: all ranks have the same weights after the last step of an epoch.

        A rule whose ranks have weights of their own shows them the center there.
        """
        self._share_carried(learner)
        with self._steps.evaluating():
            yield

    def end_epoch(
        self,
        learner: SharedLearner,
        epoch: int,
        metrics: MetricState,
        validation: MetricState | None,
        wait: bool,
    ) -> None:
        """Reports the epoch's metrics; then all ranks agree on stopping and learning rate."""
        self._share_carried(learner)
        report = EpochReport(
            epoch, self._epoch_rows if epoch == self._epoch else 0, metrics, ended=True,
            val_metrics=np.empty(0) if validation is None else validation,
            batches_done=self._epoch_batches, rows_done=self._rows,
        )  # fmt: skip
        self._control.report(report, wait=wait)
        self._learning_rate = self._agree()
        self._steps.end_epoch(learner)

    def _share_carried(self, learner: SharedLearner) -> None:
        """Gives the variables that no step exchanges (a counter) the values of the root.

        It has the most batches. Nothing to do where all ranks have as many.
        """
        if not self._uneven or not self._steps.ranks_are_equal:
            return
        mine = learner.carried_state() if self._communicator.rank == self._root else b""
        with self._clock.within("exchange"):
            given = self._communicator.all_gather(np.frombuffer(mine, np.uint8))
        if given[self._root].size and self._communicator.rank != self._root:
            learner.load_carried_state(given[self._root].tobytes())

    def _agree(self) -> float | None:
        """Agrees on what the driver has asked any of the ranks; returns its learning rate."""
        told, rate = self._control, self._control.learning_rate
        mine = np.array([told.stopped, told.changes, rate is not None, rate or 0.0], np.float64)
        with self._clock.within("wait"):
            gathered = self._communicator.all_gather(mine)
        self._stopped = self._stopped or any(bool(t[0]) for t in gathered)
        self._changes = max(int(t[1]) for t in gathered)
        self._steps.stop_agreed = False
        return next((float(t[3]) for t in gathered if t[2]), None)

    def take_changes(self, learner: SharedLearner) -> None:
        """Gives ``learner`` the changes that the ranks have agreed on."""
        if self._changes == self._changes_taken:
            return
        for changes in self._control.take_changes(self._changes):
            learner.take_changes(changes)
            self._steps.take_changes(learner, changes)
        self._changes_taken = self._changes
        self._kept = -1  # what the driver has is of before

    def keep_state(self, learner: SharedLearner, epoch: int) -> None:
        """The root leaves its weights, its optimizer state and the rule's with the driver."""
        rule_state = self._steps.save_state(learner)
        if self.keeps_state and self._control is not self._unconnected:
            self._control.keep(_pieces(learner, epoch, rule_state), epoch)
        self._kept = epoch

    def finish(self, learner: SharedLearner, epoch: int) -> None:
        """Waits for all ranks: one that ends before the others looks like one that failed.

        The root leaves its state with the driver first, unless what it left last is that.
        """
        changed = self._steps.end_run(learner)
        self.rule_state = self._steps.save_state(learner)
        with self._clock.within("wait"):
            self._communicator.barrier()
        connected = self._control is not self._unconnected
        if self.keeps_state and connected and (changed or self._kept != epoch):
            self._control.keep(_pieces(learner, epoch, self.rule_state), epoch)
        self._control.finish()

    def outcome(self, learner: SharedLearner, epoch: int) -> Outcome:
        """Without a connection to the driver, with the epochs' metrics, and on the root with its
        weights, its optimizer state and the rule's."""
        unsent = self.keeps_state and self._control is self._unconnected
        return Outcome(
            self._communicator.name, self._check.refused, unreported=self._unconnected.unreported,
            state=RunState.of(learner, epoch, bytes(self.rule_state)) if unsent else None,
        )  # fmt: skip

    @property
    def keeps_state(self) -> bool:
        """Whether this is the root, whose weights and optimizer state the run keeps."""
        return self._communicator.rank == self._root

    @property
    def orders(self) -> Orders:
        """The driver's orders that all ranks have agreed on."""
        return Orders(self._stopped, self._learning_rate)


def _pieces(learner: SharedLearner, epoch: int, rule: bytes | StoredBytes) -> Blob:
    """All that the run keeps of this rank, as bytes in several places."""
    if isinstance(rule, StoredBytes):
        return RunState.of(learner, epoch).pieces(rule)
    return RunState.of(learner, epoch, rule).pieces()
