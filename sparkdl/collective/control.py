"""What a rank of ``mode='allreduce'`` tells the driver while it trains, and hears from it."""

from __future__ import annotations

from typing import Any, Protocol


class Control(Protocol):
    """A rank's connection to the driver; see :class:`NoControl` for a run without one."""

    def join(self, rows: int, batches: int) -> None:
        """Tells the driver how many rows and batches this rank has per epoch."""

    def report(self, meta: dict[str, Any], *, wait: bool, batch: int, rows: int) -> None:
        """Sends the metrics of an epoch, so far or at its end.

        With ``wait`` it returns when the driver has released the epoch.
        """

    def keep_state(self, state: bytes, epoch: int) -> None:
        """Leaves a :class:`~sparkdl.run_state.RunState` in bytes with the driver.

        ``epoch`` is the number of epochs that are done.
        """

    def finish(self) -> None:
        """Tells the driver that this rank has trained all its epochs."""

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked all ranks to stop."""

    @property
    def learning_rate(self) -> float | None:
        """A learning rate that the driver has set, or None."""

    @property
    def unreported(self) -> dict[int, dict[str, Any]]:
        """Epoch -> its final metrics, of epochs that the driver was not told of."""


class NoControl:
    """Stands for a connection to the driver where there is none (Spark Connect).

    It keeps each epoch's final metrics, which the rank returns with its result.
    """

    stopped = False
    learning_rate: float | None = None

    def __init__(self) -> None:
        self.unreported: dict[int, dict[str, Any]] = {}

    def join(self, rows: int, batches: int) -> None:
        """Does nothing."""

    def report(self, meta: dict[str, Any], *, wait: bool, batch: int, rows: int) -> None:
        """Keeps the final metrics of each epoch."""
        if meta.get("ended"):
            self.unreported[meta["epoch"]] = {**meta, "batches": batch}

    def keep_state(self, state: bytes, epoch: int) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing."""
