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
from sparkdl.errors import ModelError
from sparkdl.weights import Layout
from sparkdl.worker import MAX_PIECE, Report, Start

MetricState = npt.NDArray[np.float64]


class Gathering(Protocol):
    """Which worker this is, and the one exchange that the launcher provides (a barrier's)."""

    @property
    def rank(self) -> int: ...

    def all_gather(self, text: str) -> list[str]: ...


class Control(Protocol):
    """A worker's line to the driver; see :class:`NoControl` for none."""

    def join(self, rows: int, batches: int) -> None:
        """Says that this worker is ready, with what it has per epoch; waits for all."""

    def report(self, meta: dict[str, Any], *, wait: bool, batch: int, rows: int) -> None:
        """Sends live or final metrics; with ``wait``, returns when the driver says so."""

    def keep_state(self, state: bytes, epoch: int) -> None:
        """Leaves weights and optimizer state, after ``epoch`` epochs, with the driver."""

    def finish(self) -> None:
        """Says that this worker is done."""

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked to stop."""

    @property
    def learning_rate(self) -> float | None:
        """A learning rate that the driver has set, or None."""


class NoControl:
    """No line to the driver: what it would hear is kept for the end, and nobody stops."""

    stopped = False
    learning_rate: float | None = None

    def __init__(self) -> None:
        self.epochs: dict[int, dict[str, Any]] = {}

    def join(self, rows: int, batches: int) -> None:
        """Nobody is told."""

    def report(self, meta: dict[str, Any], *, wait: bool, batch: int, rows: int) -> None:
        """Keeps the final metrics of each epoch."""
        if meta.get("ended"):
            self.epochs[meta["epoch"]] = {**meta, "batches": batch}

    def keep_state(self, state: bytes, epoch: int) -> None:
        """Nobody takes it."""

    def finish(self) -> None:
        """Nobody is told."""


@dataclass(frozen=True)
class AllReduceStrategy:
    """How gradients travel without a server; made on the driver, sent to the workers.

    Args:
        token: The run's secret; the same on all workers.
        layout: Of the flat buffer.
        communicator: Name of the communicator.
        options: For its connector.
        wire: What gradients travel as; see :class:`GradientSynchronizer`.
    """

    token: bytes
    layout: Layout
    communicator: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    wire: str | None = None

    @contextlib.contextmanager
    def open(
        self, identity: Gathering, layout: Layout, control: Control | None = None
    ) -> Iterator[AllReduceSynchronizer]:
        """Connects all workers; leaving it, by an error too, ends the others' waits for this one.

        Raises:
            ModelError: This worker's model is not the driver's.
            TransportError: A worker is not reached.
        """
        if not layout.matches(self.layout):
            raise ModelError(
                "the worker's model and the driver's differ",
                expected=f"{self.layout.size} values in {len(self.layout.slots)} variables",
                received=f"{layout.size} values in {len(layout.slots)} variables",
                hint="does the model build other layers on the executors?",
            )
        with self.connect(identity) as communicator:
            yield AllReduceSynchronizer(communicator, layout, control, wire=self.wire)

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

    The ranks agree on the steps of an epoch at the start; on stopping, at every
    :data:`~sparkdl.worker.MAX_PIECE` steps and at the end of an epoch; and on the learning rate
    at the end of an epoch: no rank goes its own way.

    Args:
        communicator: Connected.
        layout: Of the flat buffer.
        control: This worker's line to the driver.
        root: The rank whose weights and optimizer state all start from.
        wire: See :class:`GradientSynchronizer`.
    """

    every_batch = True

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        control: Control | None = None,
        *,
        root: int = 0,
        wire: str | None = None,
    ) -> None:
        self._communicator = communicator
        self.control: Control = NoControl() if control is None else control
        self._gradients = GradientSynchronizer(communicator, layout, wire=wire)
        self._root = root
        self._epoch = -1
        self._epoch_rows = self._epoch_batches = self._rows = 0
        self._steps = 0
        self._stopped = False
        self._learning_rate: float | None = None

    def start(self, learner: Any, rows: int, batches: int, windows: int) -> Start:
        """Agrees on the steps of an epoch, and takes the root's weights."""
        self.control.join(rows, batches)
        mine = np.array([windows, rows, -(-rows // max(batches, 1))], np.int64)
        most = self._communicator.all_reduce(mine, "max")
        self._gradients.start(learner, self._root, scale=float(max(1, most[2])))
        return Start(windows_per_epoch=int(most[0]), done=int(most[1]) == 0)

    def train(self, learner: Any, window: Any | None, report: Report) -> None:
        """The steps of all ranks for a window of batches; None is one step without a batch."""
        if report.epoch != self._epoch:
            self._epoch, self._epoch_rows, self._steps = report.epoch, 0, 0
        if window is None:
            self._gradients.skip(learner)
            self._steps += 1
        else:
            self._gradients.train(learner, window)
            self._steps += int(window.num_batches)
        self._epoch_rows += report.rows
        self._epoch_batches = report.batches_done
        self._rows += report.rows
        if report.metrics is not None:
            meta = {
                "epoch": report.epoch,
                "metrics": report.metrics.tolist(),
                "rows": self._epoch_rows,
            }
            self._tell(meta, wait=False)
        self._gradients.stop_wanted = self.control.stopped

    def train_on(self, learner: Any, window: Any, report: Report) -> None:
        """Every batch has its exchange here, so this is :meth:`train`."""
        self.train(learner, window, report)

    def _tell(self, meta: dict[str, Any], *, wait: bool) -> None:
        self.control.report(meta, wait=wait, batch=self._epoch_batches, rows=self._rows)

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
        self._tell(meta, wait=wait)
        rate = self.control.learning_rate
        mine = np.array([self.control.stopped, rate is not None, rate or 0.0], np.float64)
        told = self._communicator.all_gather(mine)
        self._stopped = self._stopped or any(bool(t[0]) for t in told)
        rates = [float(t[2]) for t in told if t[1]]
        self._learning_rate = rates[0] if rates else None

    def keep_state(self, learner: Any, epoch: int) -> None:
        """The root's weights and optimizer state; those of all ranks are the same."""
        if self._communicator.rank == self._root:
            self.control.keep_state(learner.dump_state(), epoch)

    def finish(self, learner: Any) -> None:
        """Waits for all, so that nobody's leaving looks like a failure."""
        self._communicator.barrier()
        self.control.finish()

    @property
    def keeps_state(self) -> bool:
        """The root's weights and optimizer state are those that the run keeps."""
        return self._communicator.rank == self._root

    @property
    def stopped(self) -> bool:
        if self._gradients.stop_agreed and self._steps % MAX_PIECE == 0:
            self._stopped = True
        return self._stopped

    @property
    def learning_rate(self) -> float | None:
        return self._learning_rate

    @property
    def transport(self) -> str:
        """Name of the communicator in use."""
        return str(getattr(self._communicator, "name", type(self._communicator).__name__))
