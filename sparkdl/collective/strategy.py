"""The picklable recipe of a run without a server, and the worker's side that is made from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.collective.communicator import Communicator, Member, make_communicator
from sparkdl.collective.synchronizer import GradientSynchronizer
from sparkdl.errors import TransportError
from sparkdl.weights import Layout
from sparkdl.worker import Report, Start

MetricState = npt.NDArray[np.float64]


class Gathering(Protocol):
    """Which worker this is, and the one exchange that the launcher provides (a barrier's)."""

    @property
    def rank(self) -> int: ...

    def all_gather(self, text: str) -> list[str]: ...


class Control(Protocol):
    """A worker's line to the driver; see :class:`NoControl` for none."""

    def report(self, meta: dict[str, Any], wait: bool) -> None:
        """Sends live or final metrics; with ``wait``, returns when the driver says so."""

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked to stop."""

    @property
    def learning_rate(self) -> float | None:
        """A learning rate that the driver has set, or None."""


class NoControl:
    """No line to the driver: nobody reads, nobody stops."""

    stopped = False
    learning_rate: float | None = None

    def report(self, meta: dict[str, Any], wait: bool) -> None:
        """Drops the metrics."""


@dataclass(frozen=True)
class AllReduceStrategy:
    """How gradients travel without a server; made on the driver, sent to the workers.

    Args:
        token: The run's secret; the same on all workers.
        layout: Of the flat buffer.
        communicator: Name of the communicator.
        options: For its connector.
        position: Epoch and windows that are trained already (after a restart).
    """

    token: bytes
    layout: Layout
    communicator: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    position: tuple[int, int] = (0, 0)

    @contextlib.contextmanager
    def open(
        self, identity: Gathering, layout: Layout, control: Control | None = None
    ) -> Iterator[AllReduceSynchronizer]:
        """Connects all workers; leaving it, by an error too, ends the others' waits for this one.

        Raises:
            TransportError: This worker's model is not the driver's, or a worker is not reached.
        """
        if not layout.matches(self.layout):
            raise TransportError(
                "the worker's model and the driver's differ",
                expected=f"{self.layout.size} values in {len(self.layout.slots)} variables",
                received=f"{layout.size} values in {len(layout.slots)} variables",
                hint="does the model build other layers on the executors?",
            )
        with self.connect(identity) as communicator:
            yield AllReduceSynchronizer(communicator, layout, control, position=self.position)

    @contextlib.contextmanager
    def connect(self, identity: Gathering) -> Iterator[Communicator]:
        """A communicator among all workers, closed at the end."""
        connector = make_communicator(self.communicator, rank=identity.rank, **self.options)
        try:
            texts = identity.all_gather(connector.prepare().to_json())
            communicator = connector.connect([Member.from_json(t) for t in texts], self.token)
        finally:
            connector.close()
        try:
            yield communicator
        finally:
            communicator.close()


class AllReduceSynchronizer:
    """The loop's view of gradient all-reduce; see :class:`sparkdl.worker.Synchronizer`.

    The ranks agree on the windows of an epoch at the start, and at the end of each epoch on
    whether to stop and on the learning rate, so that no rank goes its own way.

    Args:
        communicator: Connected.
        layout: Of the flat buffer.
        control: This worker's line to the driver.
        position: Epoch and windows that are trained already (after a restart).
        root: The rank whose weights and optimizer state all start from.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        control: Control | None = None,
        *,
        position: tuple[int, int] = (0, 0),
        root: int = 0,
    ) -> None:
        self._communicator = communicator
        self._control: Control = NoControl() if control is None else control
        self._gradients = GradientSynchronizer(communicator, layout)
        self._position, self._root = position, root
        self._epoch = -1
        self._epoch_rows = 0
        self._stopped = False
        self._learning_rate: float | None = None

    def start(self, learner: Any, rows: int, batches: int, windows: int) -> Start:
        """Agrees on the windows of an epoch, and takes the root's weights."""
        most = self._communicator.all_reduce(np.array([windows, rows], np.int64), "max")
        self._gradients.start(learner, self._root)
        epoch, position = self._position
        done = int(most[1]) == 0
        return Start(epoch, position, windows_per_epoch=int(most[0]), done=done)

    def train(self, learner: Any, window: Any | None, report: Report) -> None:
        """One step of all ranks; ``window`` holds one batch, or is None."""
        if report.epoch != self._epoch:
            self._epoch, self._epoch_rows = report.epoch, 0
        if report.metrics is not None:
            meta = {
                "epoch": report.epoch,
                "metrics": report.metrics.tolist(),
                "rows": self._epoch_rows,
            }
            self._control.report(meta, wait=False)
        self._epoch_rows += report.rows
        self._gradients.step(learner, window, report.rows)

    def end_epoch(
        self,
        learner: Any,
        epoch: int,
        metrics: MetricState,
        validation: MetricState | None,
        wait: bool,
    ) -> None:
        """Reports the epoch's metrics; then all ranks agree on stopping and learning rate."""
        meta: dict[str, Any] = {
            "epoch": epoch,
            "ended": True,
            "metrics": metrics.tolist(),
            "rows": self._epoch_rows if epoch == self._epoch else 0,
        }
        if validation is not None:
            meta["val_metrics"] = validation.tolist()
        self._control.report(meta, wait)
        rate = self._control.learning_rate
        mine = np.array([self._control.stopped, rate is not None, rate or 0.0], np.float64)
        told = self._communicator.all_gather(mine)
        self._stopped = any(bool(t[0]) for t in told)
        rates = [float(t[2]) for t in told if t[1]]
        self._learning_rate = rates[0] if rates else None

    def finish(self, learner: Any) -> None:
        """Waits for all, so that nobody's leaving looks like a failure."""
        self._communicator.barrier()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def learning_rate(self) -> float | None:
        return self._learning_rate
