"""The picklable recipe of a run with a server, and the worker's side that is made from it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.protocols import Learner, RankIdentity, Report, Start
from sparkdl.ps.client import Client, Progress, connect
from sparkdl.ps.codecs import Compression
from sparkdl.ps.rules.rule import Rule
from sparkdl.ps.synchronizer import GradientSynchronizer, WindowSynchronizer
from sparkdl.run_state import RunState
from sparkdl.transport.address import Address
from sparkdl.weights import Layout

MetricState = npt.NDArray[np.float64]


class Member(Protocol):
    """Which worker this is."""

    @property
    def rank(self) -> int: ...
    @property
    def attempt(self) -> int: ...


@dataclass(frozen=True)
class ServerStrategy:
    """How updates travel through a parameter server; made on the driver, sent to the workers.

    Args:
        address: Of the server.
        token: The run's secret.
        layout: Of the flat buffer.
        rule: Its worker half runs here.
        overlap: Exchange one window while the next is trained; None where it pays, see
            :class:`sparkdl.ps.synchronizer.WindowSynchronizer`.
        compression: The server's; None sends float32.
    """

    address: Address
    token: str
    layout: Layout
    rule: Rule
    overlap: bool | None = None
    compression: Compression | None = None

    @property
    def independent(self) -> bool:
        """Whether the rule keeps the workers' models apart."""
        return self.rule.independent

    @contextlib.contextmanager
    def meet(self, rank: RankIdentity) -> Iterator[RankIdentity]:
        """Nothing to begin: the workers meet at the server."""
        yield rank

    @contextlib.contextmanager
    def open(self, identity: Member, layout: Layout) -> Iterator[ServerSynchronizer]:
        """Connects; leaving says goodbye, and a worker that has not finished is then dead.

        Raises:
            TransportError: The server cannot be reached.
            ModelError: It holds another model; no other try would mend that.
        """
        if not layout.matches(self.layout):
            raise ModelError(
                "the worker's model and the server's differ",
                expected=f"{self.layout.size} values in {len(self.layout.slots)} variables",
                received=f"{layout.size} values in {len(layout.slots)} variables",
                hint="does the model build other layers on the executors?",
            )
        client = connect(
            self.address, self.token, rank=identity.rank, attempt=identity.attempt, layout=layout,
            compression=self.compression,
        )  # fmt: skip
        try:
            yield ServerSynchronizer(self.rule, client, layout, self.overlap)
        finally:
            client.close()

    def report_failure(self, identity: Member, error: BaseException) -> None:
        """Tells the server that this worker failed for good, so that no other waits for it."""
        described = "".join(traceback.format_exception_only(error)).strip()
        with (
            contextlib.suppress(Exception),
            connect(
                self.address, self.token, rank=identity.rank, attempt=identity.attempt,
                layout=self.layout,
            ) as client,
        ):  # fmt: skip
            client.fail(described, "".join(traceback.format_exception(error)))


class ServerSynchronizer:
    """A worker's side of the server; see :class:`sparkdl.worker.Synchronizer`."""

    def __init__(self, rule: Rule, client: Client, layout: Layout, overlap: bool | None) -> None:
        self._rule, self._client = rule, client
        self._gradients: GradientSynchronizer | None = None
        self._windows: WindowSynchronizer | None = None
        if rule.payload == "gradient":
            self._gradients = GradientSynchronizer(client, layout)
        else:
            if overlap is None and client.transport == "shm":
                overlap = False  # no network to hide: an exchange costs the processors that train
            self._windows = WindowSynchronizer(rule, client, layout, overlap=overlap)
        self._epoch = -1
        self._epoch_rows = 0
        self.keeps_state = False

    def start(self, learner: Any, rows: int, batches: int, windows: int) -> Start:
        """Says HELLO and takes the weights to start from.

        Workers of a blocking rule count windows (rounds), which all of them take together.
        """
        blocking = self._rule.blocking
        welcome = self._client.hello(rows=rows, batches_per_epoch=windows if blocking else batches)
        if not welcome.done:
            (self._gradients or self._windows).start(learner)  # type: ignore[union-attr]
        return Start(
            epoch=welcome.epoch,
            position=welcome.batch,
            windows_per_epoch=welcome.steps_per_epoch if blocking else None,
            done=welcome.done,
        )

    def train(self, learner: Any, window: Any | None, report: Report) -> None:
        """Trains a window and exchanges it; None takes part with nothing."""
        progress = Progress(
            epoch=report.epoch,
            batch=report.windows_done if self._rule.blocking else report.batches_done,
            batches=report.batches,
            rows=report.rows,
            learning_rate=report.learning_rate,
            meta=self._telemetry(report),
        )
        if self._gradients is not None:
            self._gradients.step(learner, window, progress)
        elif self._windows is not None:
            if window is not None:
                learner.train(window)
            self._windows.after_window(learner, progress)
        self._epoch_rows += report.rows

    def train_on(self, learner: Any, window: Any, report: Report) -> None:
        """Trains batches whose exchange comes later; tells the driver of them now and then."""
        learner.train(window)
        meta = self._telemetry(report)
        if meta is not None:
            self._client.report(meta)

    def _telemetry(self, report: Report) -> dict[str, Any] | None:
        if report.epoch != self._epoch:
            self._epoch, self._epoch_rows = report.epoch, 0
        if report.metrics is None:
            return None
        return {
            "epoch": report.epoch,
            "metrics": report.metrics.tolist(),
            "rows": self._epoch_rows,
        }

    def end_epoch(
        self,
        learner: Any,
        epoch: int,
        metrics: MetricState,
        validation: MetricState | None,
        wait: bool,
    ) -> None:
        """Reports the epoch's metrics; where workers own the weights, the lowest stores them."""
        if self._windows is not None:
            self._windows.drain(learner)
        if self._gradients is not None and self._rule.blocking:
            self._gradients.snapshot(learner, epoch + 1)
        meta: dict[str, Any] = {
            "epoch": epoch,
            "ended": True,
            "metrics": metrics.tolist(),
            "rows": self._epoch_rows if epoch == self._epoch else 0,
        }
        if validation is not None:
            meta["val_metrics"] = validation.tolist()
        self._client.report(meta, wait=wait)

    def keep_state(self, learner: Any, epoch: int) -> None:
        """Leaves the optimizer state for a checkpoint: the lead's in step, else rank 0's."""
        if self._client.lead if self._rule.blocking else self._client.rank == 0:
            if self._windows is not None:
                self._windows.drain(learner)  # its exchange would land in the buffer used here
            self._client.keep_state(learner.optimizer_state(), epoch)

    def finish(self, learner: Any) -> None:
        """Says that this worker is done."""
        if self._windows is not None:
            self._windows.drain(learner)
        # In step all have the same state; otherwise each has its own, and the first one's is kept.
        self.keeps_state = self._client.lead if self._rule.blocking else self._client.rank == 0
        self._client.finish()

    def result(self, learner: Learner, epoch: int) -> RunState | None:
        """The optimizer state that the run keeps; the weights too where no worker has the same."""
        learner.sync_model()
        if self._rule.independent:
            state = RunState.of(learner, epoch)
            return state if self.keeps_state else replace(state, optimizer=b"")
        if self.keeps_state:
            return RunState(epoch, optimizer=learner.optimizer_state())
        return None

    @property
    def unreported(self) -> dict[int, dict[str, Any]]:
        """Empty: the driver hears of every epoch from the server."""
        return {}

    @property
    def every_batch(self) -> bool:
        """No: a window's exchange follows its last batch."""
        return False

    @property
    def stopped(self) -> bool:
        return self._client.stopped

    @property
    def learning_rate(self) -> float | None:
        return self._client.learning_rate

    @property
    def bytes_sent(self) -> int:
        """Bytes of the frames that this worker sent (over shm their bodies stay in memory)."""
        return self._client.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of the frames that it received."""
        return self._client.bytes_received

    @property
    def transport(self) -> str:
        """Name of the transport in use."""
        return self._client.transport
