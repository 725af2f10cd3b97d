"""What a rank of ``mode='allreduce'`` tells the driver while it trains, and hears from it."""

from __future__ import annotations

from typing import Protocol

from sparkdl.changes import VariableChanges
from sparkdl.reports import EpochReport


class Control(Protocol):
    """A rank's connection to the driver: a :class:`~sparkdl.coordinator.session.Session`.

    :class:`NoControl` stands for it in a run without one.
    """

    def join(self, *, rows: int, batches_per_epoch: int) -> object:
        """Tells the driver how many rows and batches this rank has."""

    def report(self, report: EpochReport, *, wait: bool = False) -> None:
        """Sends the metrics of an epoch; with ``wait``, returns when the driver releases it."""

    def keep(self, state: bytes, epoch: int) -> None:
        """Leaves a :class:`~sparkdl.run_state.RunState` in bytes with the driver.

        ``epoch`` is the number of epochs that are done.
        """

    def finish(self) -> None:
        """Tells the driver that this rank has trained all its epochs."""

    @property
    def changes(self) -> int:
        """How many changes of variables the driver asks this rank to have taken."""

    def take_changes(self, count: int) -> list[VariableChanges]:
        """What the driver's callbacks wrote to the model since the last call, up to ``count``."""

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked all ranks to stop."""

    @property
    def learning_rate(self) -> float | None:
        """A learning rate that the driver has set, or None."""


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

    def keep(self, state: bytes, epoch: int) -> None:
        """Does nothing."""

    def take_changes(self, count: int) -> list[VariableChanges]:
        """There are none."""
        return []

    def finish(self) -> None:
        """Does nothing."""
