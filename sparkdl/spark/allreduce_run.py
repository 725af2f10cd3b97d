"""One run without a server: gradients between the workers, and a line to the driver.

On classic Spark the line is a small server process beside the driver (the parameter server's state
machine with nothing in its center): it takes metrics, keeps rank 0's state of the last epoch, and
tells the workers to stop. On Spark Connect the workers cannot reach the client: they bring their
metrics with them when the stage ends.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkdl.collective.strategy import AllReduceStrategy, AllReduceSynchronizer
from sparkdl.errors import ConfigError, TransportError, UnknownNameError
from sparkdl.history import EpochProgress, RunProgress
from sparkdl.ps.client import Client, connect
from sparkdl.ps.rules import make_rule
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.spark.cluster import is_connect
from sparkdl.spark.server_run import ServerOptions, ServerRun
from sparkdl.weights import FloatArray, Layout

COMMUNICATORS = ("auto", "horovod", "builtin")
_WIRES = {"fp16": "float16", "bf16": "bfloat16"}
_EMPTY = Layout.of([("nothing", (1,), "float32")])
"""What the server of a run holds in which no weights travel through it."""


@dataclass(frozen=True)
class AllReduceRecipe:
    """How ``mode='allreduce'`` runs; see :class:`sparkdl.spark.fitting.Recipe`.

    Args:
        communicator: Its name.
        wire: What gradients travel as; None for float32.
        options: Of the line to the driver.
        max_restarts: How often a lost stage is begun again.
        rule: How the ranks' gradients or weights become one.
        window: Always 1: every batch has its exchange.
    """

    communicator: str
    wire: str | None
    options: ServerOptions
    max_restarts: int
    rule: Any = None
    window: int = 1
    in_step: bool = True
    barrier: bool = True

    def prepare(self, model: Any, num_workers: int) -> None:
        """Nothing to fit."""

    def reports_live(self, spark: Any) -> bool:
        """Whether the driver hears of the workers while they train."""
        return not is_connect(spark)

    @contextlib.contextmanager
    def start(
        self, layout: Layout, center: FloatArray, num_workers: int, spark: Any, at_once: int
    ) -> Iterator[Future[Any]]:
        """Starts the line to the driver in the background, if there can be one."""
        strategy = AllReduceStrategy(
            secrets.token_bytes(32), layout, self.communicator,
            {"timeout_s": max(self.options.worker_timeout_s, 30.0)}, self.wire,
        )  # fmt: skip
        if not self.reports_live(spark):
            future: Future[Any] = Future()
            future.set_result(SilentRun(GangStrategy(strategy, None), layout))
            yield future
            return
        rule = make_rule("bsp", payload="gradient")
        zero = np.zeros(1, np.float32)
        with ServerRun.start(
            self.options, rule, _EMPTY, zero, num_workers, spark,
            max_state_bytes=16 * layout.size_bytes + (64 << 20),
        ) as starting:  # fmt: skip
            yield _Mapped(starting, lambda line: AllReduceRun(line, strategy, layout))


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
        UnknownNameError: No such communicator.
    """
    if communicator not in COMMUNICATORS:
        raise UnknownNameError("communicator", communicator, COMMUNICATORS)
    if frequency not in ("auto", "batch", 1):
        raise ConfigError(
            "mode 'allreduce' exchanges a gradient at every batch",
            expected="frequency='batch' (or 'auto')",
            received=f"frequency={frequency!r}",
            hint="mode='synchronous' or 'asynchronous' takes longer windows",
        )
    if rule is not None:
        raise ConfigError(
            "mode 'allreduce' has one rule, the row-weighted mean of the gradients",
            expected="rule=None",
            received=repr(rule),
            hint="rules belong to the modes with a server",
        )
    if compression is not None and compression not in _WIRES:
        raise ConfigError(
            "mode 'allreduce' cannot reduce what this codec makes",
            expected="compression=None, 'fp16' or 'bf16'",
            received=repr(compression),
            hint="sparse and quantized codecs work in the modes with a server",
        )
    return AllReduceRecipe(communicator, _WIRES.get(compression), options, max_restarts)


@dataclass(frozen=True)
class GangStrategy:
    """The workers' recipe: the communicator, and the line to the driver.

    Args:
        gradients: How gradients travel.
        line: To the driver; None without.
    """

    gradients: AllReduceStrategy
    line: ServerStrategy | None

    @contextlib.contextmanager
    def open(self, identity: Any, layout: Layout) -> Iterator[AllReduceSynchronizer]:
        """Connects to the driver, then all workers with each other."""
        with contextlib.ExitStack() as stack:
            control = None
            if self.line is not None:
                client = connect(
                    self.line.address, self.line.token, rank=identity.rank,
                    attempt=identity.attempt, layout=_EMPTY,
                )  # fmt: skip
                control = DriverLine(stack.enter_context(client))
            yield stack.enter_context(self.gradients.open(identity, layout, control))

    def report_failure(self, identity: Any, error: BaseException) -> None:
        """Tells the driver that this worker failed for good."""
        if self.line is not None:
            self.line.report_failure(identity, error)


class DriverLine:
    """A worker's line to the driver; see :class:`sparkdl.collective.strategy.Control`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def join(self, rows: int, batches: int) -> None:
        """Waits for all; WaitTimeoutError names the ranks that are missing."""
        self._client.hello(rows=rows, batches_per_epoch=batches)

    def report(self, meta: dict[str, Any], *, wait: bool, batch: int, rows: int) -> None:
        self._client.report(meta, wait=wait, batch=batch, rows=rows)

    def keep_state(self, state: bytes, epoch: int) -> None:
        self._client.keep_state(state, epoch)

    def finish(self) -> None:
        self._client.finish()

    @property
    def stopped(self) -> bool:
        return self._client.stopped

    @property
    def learning_rate(self) -> float | None:
        return self._client.learning_rate


class AllReduceRun:
    """The driver's part where it hears of the workers; see :class:`sparkdl.spark.training.Run`."""

    def __init__(self, line: ServerRun, gradients: AllReduceStrategy, layout: Layout) -> None:
        self._line, self._layout = line, layout
        self.strategy = GangStrategy(gradients, line.strategy)

    def progress(self) -> RunProgress:
        """What the workers report; raises TransportError if the line's server is gone."""
        return self._line.progress()

    def command(self, command: dict[str, Any]) -> None:
        """Passes a command on to the workers."""
        self._line.command(command)

    def checkpoint(self) -> tuple[int, FloatArray, bytes] | None:
        """Epochs done, weights and optimizer state that rank 0 left last; None if it has not."""
        with contextlib.suppress(TransportError):
            epoch, state = self._line.kept_state()
            if epoch >= 0:
                return epoch, *split_state(state, self._layout)
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

    def result(self, rows: list[Any]) -> FloatArray:
        """The trained weights, which rank 0 returned."""
        return joined_weights(rows)


@dataclass
class SilentRun:
    """The driver's part where the workers cannot reach it: all news come with the result."""

    strategy: GangStrategy
    layout: Layout
    rows: list[Any] = field(default_factory=list)

    def progress(self) -> RunProgress:
        """Nothing while the stage runs; after it, all epochs."""
        told = [json.loads(r.text) for r in self.rows if r.kind == "epochs"]
        epochs: dict[int, EpochProgress] = {}
        for number in sorted({int(n) for worker in told for n in worker}):
            parts = [worker[str(number)] for worker in told if str(number) in worker]
            epochs[number] = EpochProgress(
                missing=0,
                batches=sum(p["batches"] for p in parts),
                rows=sum(p["rows"] for p in parts),
                metrics=_sum_states(p["metrics"] for p in parts),
                val_metrics=_sum_states(p.get("val_metrics", []) for p in parts),
            )
        return RunProgress(
            epochs=epochs,
            batches_per_epoch=max((e.batches for e in epochs.values()), default=0),
            rows=sum(e.rows for e in epochs.values()),
        )

    def command(self, command: dict[str, Any]) -> None:
        """The workers cannot hear it: the driver acts on it between two stages."""

    def checkpoint(self) -> None:
        """None: the driver's own model is what the last whole stage left."""

    def pull(self) -> FloatArray:
        """The weights that the stage returned."""
        return joined_weights(self.rows)

    def optimizer_state(self) -> bytes:
        """The optimizer state that the stage returned."""
        return b"".join(bytes(r.content) for r in self.rows if r.kind == "optimizer")

    def result(self, rows: list[Any]) -> FloatArray:
        """Takes the stage's result in; returns the trained weights."""
        self.rows = rows
        return joined_weights(rows)


class _Mapped(Future[Any]):
    """A future whose result goes through a function."""

    def __init__(self, source: Future[Any], function: Any) -> None:
        super().__init__()
        self._source, self._function = source, function

    def result(self, timeout: float | None = None) -> Any:
        return self._function(self._source.result(timeout))


def joined_weights(rows: list[Any]) -> FloatArray:
    """The weights in the result rows of a stage."""
    content = b"".join(bytes(r.content) for r in rows if r.kind == "weights")
    return np.frombuffer(content, np.float32)


def split_state(state: bytes, layout: Layout) -> tuple[FloatArray, bytes]:
    """Weights and optimizer state, as :meth:`KerasLearner.dump_state` joined them."""
    size = layout.size_bytes
    return np.frombuffer(state[:size], np.float32), state[size:]


def _sum_states(states: Any) -> Any:
    """The sum of metric states; a worker without rows has none."""
    longest = 0
    arrays = [np.asarray(s, np.float64) for s in states]
    longest = max((a.size for a in arrays), default=0)
    return sum((np.pad(a, (0, longest - a.size)) for a in arrays), np.zeros(longest))
