"""One run without a server: gradients between the workers, and a line to the driver.

On classic Spark a coordinator in the driver takes metrics, keeps one rank's state of the last
epoch, and tells the workers to stop. On Spark Connect the workers cannot reach the client: they
bring their metrics with them when the stage ends.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from sparkdl.collective.rules import ExchangeRule, Mean
from sparkdl.collective.strategy import AllReduceStrategy, EarlyGathering
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.coordinator.host import CoordinatorHost
from sparkdl.coordinator.session import Session, open_session, report_failure
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import EpochReport
from sparkdl.errors import TransportError
from sparkdl.launch.failures import FailureDescription, RankFailure
from sparkdl.progress.commands import Command
from sparkdl.progress.run_progress import EpochProgress, RunProgress, progress_of
from sparkdl.run_state import RunState
from sparkdl.spark.driver.allreduce_rules import WIRES, choose_exchange, optimizer_config
from sparkdl.spark.driver.cluster import driver_address, is_connect
from sparkdl.spark.driver.server_run import ServerOptions
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.transport.address import Endpoint
from sparkdl.transport.listeners import ListenOptions
from sparkdl.weights import FloatArray, Layout

COMMUNICATORS = ("auto", "horovod", "builtin")
CONNECT_TIMEOUT_S = 20.0
_LEAVING_S = 1.5
"""Until every rank has left the stage's ``allGather``, which looks for its answer once a second:
Spark 4.3 ends the executor of a task that waits there when its stage is ended."""


@dataclass
class RuleMemory:
    """What a recipe keeps between its runs.

    Args:
        optimizer: Of the model at the last :meth:`AllReduceRecipe.prepare`.
        state: The rule's, where the Keras optimizer has no room for it (an outer momentum).
    """

    optimizer: dict[str, Any] | None = None
    state: bytes = b""


@dataclass(frozen=True)
class AllReduceRecipe:
    """How ``mode='allreduce'`` runs; see :class:`sparkdl.spark.driver.fitting.Recipe`.

    Args:
        communicator: Its name.
        wire: What gradients travel as; None for float32.
        options: Of the line to the driver.
        max_restarts: How often a lost stage is begun again.
        rule: How the ranks' gradients or weights become one.
        window: Batches between two of its exchanges.
        memory: What it keeps from one fit to the next.
    """

    communicator: str
    wire: str | None
    options: ServerOptions
    max_restarts: int
    rule: ExchangeRule
    window: int = 1
    memory: RuleMemory = field(default_factory=RuleMemory, compare=False, repr=False)
    in_step: bool = True
    barrier: bool = True

    @property
    def compression(self) -> str | None:
        """What the user called :attr:`wire`."""
        return {wire: name for name, wire in WIRES.items()}.get(self.wire or "")

    def prepare(self, model: Any, num_workers: int) -> None:
        """Checks the rule against the run.

        Raises:
            ConfigError: It cannot work with that many workers, or with the model's optimizer.
        """
        self.memory.optimizer = optimizer_config(model.optimizer)
        self.rule.bind(num_workers, self.memory.optimizer)

    @property
    def rule_state(self) -> bytes:
        """What the rule keeps where the Keras optimizer has no room: an outer momentum."""
        return self.memory.state

    def resume(self, rule_state: bytes) -> None:
        """Goes on from what an earlier run's rule kept."""
        self.memory.state = rule_state

    def reports_live(self, spark: Any) -> bool:
        """Whether the driver hears of the workers while they train."""
        return not is_connect(spark)

    @contextlib.contextmanager
    def start(
        self, layout: Layout, center: FloatArray, num_workers: int, spark: Any, at_once: int
    ) -> Iterator[Future[Any]]:
        """Starts the line to the driver in the background, if there can be one."""
        live = self.reports_live(spark)
        strategy = AllReduceStrategy(
            secrets.token_bytes(32), layout, self._communicator(), self._limits(live), self.wire,
            self._bound_rule(num_workers), self.window, self.memory.state,
        )  # fmt: skip
        if not live:
            future: Future[Any] = Future()
            future.set_result(SilentRun(GangStrategy(strategy, None), layout, self.memory))
            yield future
            return
        options = self.options
        bind, advertised = options.bind, options.advertised
        if bind is None:
            bind, reachable = driver_address(spark)
            advertised = advertised or reachable
        settings = Settings(
            num_workers,
            lease_s=options.worker_timeout_s,
            start_timeout_s=options.start_timeout_s,
            max_state_bytes=16 * layout.size_bytes + (64 << 20),
        )
        listen = ListenOptions("socket", options.port, bind, advertised, web=False)
        with CoordinatorHost(settings, listen) as host:
            started: Future[Any] = Future()
            started.set_result(AllReduceRun(host, strategy, layout, num_workers, self.memory))
            yield started

    def _limits(self, live: bool) -> dict[str, float]:
        """How long the communicator waits: for ranks that evaluate or compile, and to connect.

        Ranks that met by the line come to connect at the same moment; without it one may still
        import its framework.
        """
        start_s = self.options.start_timeout_s
        return {
            "timeout_s": max(self.options.worker_timeout_s, start_s),
            "connect_timeout_s": min(CONNECT_TIMEOUT_S, start_s) if live else start_s,
        }

    def _communicator(self) -> str:
        """Horovod's operations are TensorFlow's: other backends do not import it for nothing."""
        import keras

        if self.communicator == "auto" and keras.backend.backend() != "tensorflow":
            return "builtin"
        return self.communicator

    def _bound_rule(self, num_workers: int) -> ExchangeRule | None:
        """None for the mean at every step, which is faster inside the compiled step."""
        if type(self.rule) is Mean and self.window == 1:
            return None
        return self.rule.bind(num_workers, self.memory.optimizer)


def choose_allreduce(
    frequency: str | int,
    rule: Any,
    communicator: str,
    compression: Any,
    max_restarts: int,
    options: ServerOptions,
    model: Any,
) -> AllReduceRecipe:
    """The recipe for what the user asked.

    Raises:
        ConfigError: A combination that makes no sense.
        UnknownNameError: No such rule.
    """
    chosen, window, wire = choose_exchange(
        frequency, rule, compression, communicator, model.optimizer
    )
    return AllReduceRecipe(communicator, wire, options, max_restarts, chosen, window)


@dataclass(frozen=True)
class GangStrategy:
    """The workers' recipe: the communicator, and the line to the driver.

    Args:
        gradients: How gradients travel.
        line: The coordinator at the driver; None where ranks cannot reach it.
    """

    gradients: AllReduceStrategy
    line: Endpoint | None
    independent: ClassVar[bool] = False

    @contextlib.contextmanager
    def meet(self, identity: Any) -> Iterator[Any]:
        """Begins to meet the other ranks, before this one imports anything or reads its rows.

        Args:
            identity: This worker's.

        Yields:
            What :meth:`open` takes in its place.
        """
        if self.line is not None:  # the ranks meet there, which is quick, and names who is missing
            yield identity
            return
        early = EarlyGathering(identity, self.gradients.connector(identity.rank))
        with contextlib.closing(early):
            yield early

    @contextlib.contextmanager
    def open(self, identity: Any, layout: Layout) -> Iterator[AllReduceSynchronizer]:
        """Connects to the driver, then all workers with each other."""
        with contextlib.ExitStack() as stack:
            control = None
            if self.line is not None:
                session = open_session(self.line, rank=identity.rank, attempt=identity.attempt)
                control = DriverLine(stack.enter_context(session))
            yield stack.enter_context(self.gradients.open(control or identity, layout, control))

    def report_failure(self, identity: Any, error: BaseException) -> None:
        """Tells the driver that this worker failed for good.

        Raises:
            RankFailure: There is no line to it: Spark ends the others, and carries the news.
        """
        if self.line is None:
            time.sleep(_LEAVING_S)
            raise RankFailure(FailureDescription.of(identity.rank, error)) from error
        report_failure(self.line, identity.rank, identity.attempt, error)


class DriverLine:
    """A worker's session with the coordinator, as all-reduce strategies use it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rank, self.attempt = session.rank, session.attempt
        self.unreported: dict[int, dict[str, Any]] = {}

    def all_gather(self, text: str) -> list[str]:
        """Every rank's text, by way of the coordinator: a barrier's ``allGather`` takes a second.

        Raises:
            WaitTimeoutError: Some ranks did not come in time; they are named.
        """
        return self._session.meet(text)

    def join(self, rows: int, batches: int) -> None:
        """Tells what this worker has."""
        self._session.join(rows=rows, batches_per_epoch=batches)

    def report(self, meta: dict[str, Any], *, wait: bool, batch: int, rows: int) -> None:
        """Sends metrics of an epoch; with ``wait``, returns when the driver releases it."""
        report = EpochReport(
            meta["epoch"],
            meta["rows"],
            np.asarray(meta["metrics"], np.float64),
            ended=bool(meta.get("ended")),
            val_metrics=np.asarray(meta.get("val_metrics", ()), np.float64),
            batches_done=batch,
            rows_done=rows,
        )
        self._session.report(report, wait=wait)

    def keep_state(self, state: bytes, epoch: int) -> None:
        """Leaves the state after ``epoch`` epochs with the driver."""
        self._session.keep(state, epoch)

    def finish(self) -> None:
        """Says that this worker is done."""
        self._session.finish()

    @property
    def stopped(self) -> bool:
        return self._session.stopped

    @property
    def learning_rate(self) -> float | None:
        return self._session.learning_rate


class AllReduceRun:
    """The driver's part where it hears of the workers; see :class:`Run`."""

    def __init__(
        self,
        host: CoordinatorHost,
        gradients: AllReduceStrategy,
        layout: Layout,
        num_workers: int,
        memory: RuleMemory,
    ) -> None:
        self._driver, self._layout, self._memory = host.driver, layout, memory
        self._num_workers = num_workers
        self.strategy = GangStrategy(gradients, host.endpoint)

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """What the workers report."""
        return progress_of(self._driver.status(since_epoch), self._num_workers, in_step=True)

    def command(self, command: Command) -> None:
        """Passes a command on to the workers."""
        self._driver.control(
            stop=command.stop, learning_rate=command.learning_rate, release=command.release
        )

    def checkpoint(self) -> tuple[int, FloatArray, bytes] | None:
        """Epochs done, weights and optimizer state that rank 0 left last; None if it has not."""
        with contextlib.suppress(TransportError):
            kept = self._driver.kept()
            if kept:
                state = RunState.from_bytes(kept)
                self._memory.state = state.rule
                return state.epoch, state.weights, state.optimizer
        return None

    def pull(self) -> FloatArray:
        """The weights after the last epoch."""
        kept = self.checkpoint()
        if kept is None:
            raise TransportError(
                "no worker has left its weights yet", expected="an epoch that has ended"
            )
        return kept[1]

    def optimizer_state(self) -> bytes:
        """The optimizer state after the last epoch."""
        kept = self.checkpoint()
        return b"" if kept is None else kept[2]

    def result(self, trained: Mapping[int, TrainedRank]) -> FloatArray:
        """The trained weights, which one rank returned; keeps the rule's state."""
        state = kept_state(trained)
        self._memory.state = state.rule
        return state.weights


@dataclass
class SilentRun:
    """The driver's part where the workers cannot reach it: all news come with the result."""

    strategy: GangStrategy
    layout: Layout
    memory: RuleMemory
    trained: Mapping[int, TrainedRank] = field(default_factory=dict)

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """Nothing while the stage runs; after it, all epochs."""
        told = [rank.unreported for rank in self.trained.values()]
        seconds = max((rank.seconds for rank in self.trained.values()), default=0.0)
        numbers = sorted({n for worker in told for n in worker})
        epochs: dict[int, EpochProgress] = {}
        for number in numbers:
            parts = [worker[number] for worker in told if number in worker]
            epochs[number] = EpochProgress(
                missing=0,
                batches=sum(p["batches"] for p in parts),
                rows=sum(p["rows"] for p in parts),
                metrics=_sum_states(p["metrics"] for p in parts),
                val_metrics=_sum_states(p.get("val_metrics", []) for p in parts),
                seconds=seconds / len(numbers),
            )
        return RunProgress(
            epochs=epochs,
            batches_per_epoch=max((e.batches for e in epochs.values()), default=0),
            rows=sum(e.rows for e in epochs.values()),
        )

    def command(self, command: Command) -> None:
        """The workers cannot hear it: the driver acts on it between two stages."""

    def checkpoint(self) -> None:
        """None: the driver's own model is what the last whole stage left."""

    def pull(self) -> FloatArray:
        """The weights that the stage returned."""
        return kept_state(self.trained).weights

    def optimizer_state(self) -> bytes:
        """The optimizer state that the stage returned."""
        return kept_state(self.trained).optimizer

    def result(self, trained: Mapping[int, TrainedRank]) -> FloatArray:
        """Takes over what the ranks returned; the trained weights."""
        self.trained = trained
        state = kept_state(trained)
        self.memory.state = state.rule
        return state.weights


def kept_state(trained: Mapping[int, TrainedRank]) -> RunState:
    """The state that one rank of a stage returned."""
    return next((t.state for t in trained.values() if t.state is not None), RunState(0))


def _sum_states(states: Any) -> Any:
    """The sum of metric states; a worker without rows has none."""
    longest = 0
    arrays = [np.asarray(s, np.float64) for s in states]
    longest = max((a.size for a in arrays), default=0)
    return sum((np.pad(a, (0, longest - a.size)) for a in arrays), np.zeros(longest))
