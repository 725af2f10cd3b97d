"""The picklable recipe of a run without a server, and the worker's side that is made from it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.collective.communicator import Communicator, Connector, Member, make_communicator
from sparkdl.collective.rule_synchronizer import RuleSynchronizer
from sparkdl.collective.rules import ExchangeRule
from sparkdl.collective.synchronizer import AllReduceGradientSynchronizer
from sparkdl.errors import ModelError
from sparkdl.protocols import Learner, Report, Start
from sparkdl.run_state import RunState
from sparkdl.weights import Layout
from sparkdl.worker import MAX_PIECE

MetricState = npt.NDArray[np.float64]


class Gathering(Protocol):
    """Which worker this is, and the one exchange that the launcher provides (a barrier's)."""

    @property
    def rank(self) -> int: ...

    def all_gather(self, text: str) -> list[str]: ...


class EarlyGathering:
    """An exchange that has begun before its result is needed.

    Where it comes first, before anything that may hang, a rank that is missing later is missed
    by the connecting of the communicator, which can name it.

    Args:
        gathering: The launcher's.
        connector: Of the communicator to be; prepared here.
    """

    def __init__(self, gathering: Gathering, connector: Connector) -> None:
        self.rank, self.connector = gathering.rank, connector
        self._answer: Future[list[str]] = Future()
        said = connector.prepare().to_json()

        def work() -> None:
            try:
                self._answer.set_result(gathering.all_gather(said))
            except BaseException as error:
                self._answer.set_exception(error)

        threading.Thread(target=work, name="sparkdl-early", daemon=True).start()

    def all_gather(self, text: str) -> list[str]:
        """What the connectors of all ranks said; ``text`` has no part in it."""
        return self._answer.result()

    def close(self) -> None:
        """Closes the connector's sockets, if no communicator took them over."""
        self.connector.close()


class Control(Protocol):
    """A worker's line to the driver; see :class:`NoControl` for none."""

    def join(self, rows: int, batches: int) -> None:
        """Tells what this worker has per epoch."""

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

    @property
    def epochs(self) -> dict[int, dict[str, Any]]:
        """Final metrics of each epoch that the driver was not told of."""


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
        wire: What gradients travel as; see :class:`AllReduceGradientSynchronizer`.
        rule: What becomes of them; None: their mean, at every step.
        window: Steps between two exchanges of the rule.
        rule_state: Of an earlier run; see :class:`RuleSynchronizer`.
    """

    token: bytes
    layout: Layout
    communicator: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    wire: str | None = None
    rule: ExchangeRule | None = None
    window: int = 1
    rule_state: bytes = b""

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
        with (
            self.connect(identity) as communicator,
            contextlib.closing(self._steps(communicator, layout)) as steps,
        ):
            yield AllReduceSynchronizer(communicator, layout, control, steps=steps)

    def _steps(
        self, communicator: Communicator, layout: Layout
    ) -> AllReduceGradientSynchronizer | RuleSynchronizer:
        if self.rule is None:
            return AllReduceGradientSynchronizer(communicator, layout, wire=self.wire)
        return RuleSynchronizer(
            communicator, layout, self.rule, self.window, wire=self.wire, state=self.rule_state
        )

    def connector(self, rank: int) -> Connector:
        """A rank's communicator in the making."""
        return make_communicator(self.communicator, rank=rank, **self.options)

    @contextlib.contextmanager
    def connect(self, identity: Gathering) -> Iterator[Communicator]:
        """A communicator among all workers, closed at the end."""
        prepared = identity.connector if isinstance(identity, EarlyGathering) else None
        connector = prepared or self.connector(identity.rank)
        try:
            said = "" if prepared else connector.prepare().to_json()
            texts = identity.all_gather(said)
            communicator = connector.connect([Member.from_json(t) for t in texts], self.token)
        finally:
            connector.close()
        try:
            yield communicator
        finally:
            communicator.close()


class AllReduceSynchronizer:
    """The loop's view of training without a server; see :class:`sparkdl.worker.Synchronizer`.

    The ranks agree on the steps of an epoch at the start; on stopping, at every
    :data:`~sparkdl.worker.MAX_PIECE` steps and at the end of an epoch; and on the learning rate
    at the end of an epoch: no rank goes its own way.

    Args:
        communicator: Connected.
        layout: Of the flat buffer.
        control: This worker's line to the driver.
        steps: What a step is; None for a :class:`AllReduceGradientSynchronizer`.
    """

    every_batch = True

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        control: Control | None = None,
        *,
        steps: AllReduceGradientSynchronizer | RuleSynchronizer | None = None,
    ) -> None:
        self._communicator = communicator
        self.control: Control = NoControl() if control is None else control
        self._exchange = steps or AllReduceGradientSynchronizer(communicator, layout)
        self._root = 0
        self.rule_state = b""
        self._epoch = -1
        self._epoch_rows = self._epoch_batches = self._rows = 0
        self._steps = 0
        self._stopped = False
        self._learning_rate: float | None = None

    def start(self, learner: Any, rows: int, batches: int, windows: int) -> Start:
        """Agrees on the steps of an epoch, and takes the weights of the root.

        That is the first rank with the most rows: one without any has no optimizer state to keep.
        """
        self.control.join(rows, batches)
        mine = np.array([windows, rows, -(-rows // max(batches, 1))], np.int64)
        told = np.stack(self._communicator.all_gather(mine))
        steps, most_rows, batch_rows = (int(v) for v in told.max(axis=0))
        self._root = int(told[:, 1].argmax())
        self._exchange.start(learner, self._root, scale=float(max(1, batch_rows)), steps=steps)
        return Start(windows_per_epoch=steps, done=most_rows == 0)

    def train(self, learner: Any, window: Any | None, report: Report) -> None:
        """The steps of all ranks for a window of batches; None is one step without a batch."""
        if report.epoch != self._epoch:
            self._epoch, self._epoch_rows, self._steps = report.epoch, 0, 0
        if window is None:
            self._exchange.skip(learner)
            self._steps += 1
        else:
            self._exchange.train(learner, window)
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
        self._exchange.stop_wanted = self.control.stopped

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
        self._exchange.end_epoch(learner)

    def keep_state(self, learner: Any, epoch: int) -> None:
        """The root's weights, optimizer state and the rule's."""
        rule_state = self._exchange.save_state(learner)
        if self._communicator.rank == self._root:
            self.control.keep_state(join_state(learner.dump_state(), rule_state), epoch)

    def finish(self, learner: Any) -> None:
        """Waits for all, so that nobody's leaving looks like a failure."""
        self._exchange.end_run(learner)
        self.rule_state = self._exchange.save_state(learner)
        self._communicator.barrier()
        self.control.finish()

    @property
    def keeps_state(self) -> bool:
        """The root's weights and optimizer state are those that the run keeps."""
        return self._communicator.rank == self._root

    def result(self, learner: Learner, epoch: int) -> RunState | None:
        """The root's weights and optimizer state, and the rule's."""
        if not self.keeps_state:
            return None
        learner.sync_model()
        return RunState.of(learner, epoch, self.rule_state)

    @property
    def unreported(self) -> dict[int, dict[str, Any]]:
        """What a :class:`NoControl` kept."""
        return self.control.epochs

    @property
    def stopped(self) -> bool:
        if self._exchange.stop_agreed and self._steps % MAX_PIECE == 0:
            self._stopped = True
        return self._stopped

    @property
    def learning_rate(self) -> float | None:
        return self._learning_rate

    @property
    def transport(self) -> str:
        """Name of the communicator in use."""
        return str(getattr(self._communicator, "name", type(self._communicator).__name__))


def join_state(learner: bytes, rule: bytes) -> bytes:
    """A learner's state, a rule's, and the length of that."""
    return learner + rule + len(rule).to_bytes(8, "little")


def split_state(state: bytes) -> tuple[bytes, bytes]:
    """The counterpart of :func:`join_state`.

    >>> split_state(join_state(b'weights', b'momentum'))
    (b'weights', b'momentum')
    """
    size = int.from_bytes(state[-8:], "little")
    end = len(state) - 8
    return state[: end - size], state[end - size : end]
