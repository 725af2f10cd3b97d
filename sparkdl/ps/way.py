"""``Way``: how a worker and its server exchange; ``Unwrapping``: errors out of a framework."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from sparkdl.ps.client import Progress
from sparkdl.training.changes import VariableChanges
from sparkdl.training.learning import BatchStack, SharedLearner


class Way(abc.ABC):
    """By windows, in rounds, or gradient by gradient; one thread uses it.

    ``ServerSynchronizer`` joins the run, takes the driver's orders and reports; a way trains and
    exchanges.
    """

    every_batch: ClassVar[bool] = False
    """See :class:`sparkdl.training.syncing.Synchronizer`."""

    @property
    def cuts_stacks(self) -> bool:
        """Whether exchanges may happen inside a learner's call."""
        return False

    @property
    def counted(self) -> float:
        """The part of this worker's changes that counted; see :mod:`sparkdl.rules.damping`."""
        return 1.0

    @abc.abstractmethod
    def start(self, learner: SharedLearner, epoch: int = 0, batch: int = 0) -> bool:
        """Gives ``learner`` the weights to start from, of this position.

        Returns:
            Whether the learner has the optimizer state of that moment, too.
        """

    @abc.abstractmethod
    def take(
        self, learner: SharedLearner, stack: BatchStack | None, window: int, progress: Progress
    ) -> None:
        """Trains a stack and exchanges; None exchanges without a batch.

        Args:
            learner, stack: See :class:`sparkdl.training.syncing.Synchronizer`.
            window: Batches between two exchanges within the stack; 0 for one exchange after it.
            progress: After the stack.
        """

    def take_open(self, learner: SharedLearner, stack: BatchStack, progress: Progress) -> None:
        """Trains a stack whose exchange comes later."""
        learner.train(stack)

    @contextlib.contextmanager
    def weights_of_run(self, learner: SharedLearner, last: bool) -> Iterator[None]:
        """Within, ``learner`` has the weights of the run; see
        :class:`sparkdl.training.syncing.Synchronizer`."""
        yield

    def drain(self, learner: SharedLearner) -> None:  # noqa: B027  (most exchanges end at once)
        """Ends an exchange that runs beside the training: it would land in the client's buffer."""

    def end_epoch(self, learner: SharedLearner, epoch: int) -> None:
        """Called before the epoch is reported; ``epoch`` is the one that ends."""
        self.drain(learner)

    def take_changes(self, learner: SharedLearner, changes: Sequence[VariableChanges]) -> None:
        """Gives ``learner`` the changes, which the server's weights have too."""
        for change in changes:
            learner.take_changes(change)

    def keeps_state(self, holds: bool, epoch: int) -> bool:
        """Whether this worker leaves its optimizer state for the checkpoint after ``epoch`` epochs.

        Args:
            holds: Whether the run keeps this worker's state at its end.
            epoch: Epochs that are done.
        """
        return holds

    def end_run(self, learner: SharedLearner) -> None:
        """Sends what was trained since the last exchange."""
        self.drain(learner)


class Unwrapping:
    """A framework wraps what a Python function raises inside its compiled call; this undoes it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around our own code in the call: keeps what it raises."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the framework's call: raises what was kept in place of what the framework does."""
        self._error = None
        try:
            yield
        except Exception:
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise
