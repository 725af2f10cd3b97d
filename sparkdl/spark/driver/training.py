"""The driver's side of one fit: one broadcast, one stage, one collect, watched while it runs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np

from sparkdl import errors
from sparkdl.coordinator.status import Failure
from sparkdl.errors import DataError, SparkDLError, TransportError, WorkerError
from sparkdl.launch import interrupts
from sparkdl.launch.failures import described_in
from sparkdl.launch.results import RESULT_SCHEMA
from sparkdl.learner import model_weights, optimizer_state
from sparkdl.learner.archive import pickle_by_value
from sparkdl.progress.commands import Command
from sparkdl.progress.monitor import FitMonitor
from sparkdl.progress.run_progress import RunProgress
from sparkdl.spark.columns.sources import Source, spread
from sparkdl.spark.driver.cluster import Stage, barrier_refusal, is_connect
from sparkdl.spark.executor.train_stage import stage_function
from sparkdl.spark.executor.trainer import TrainTask
from sparkdl.weights import FloatArray

POLL_S = 0.1
INLINE_BYTES = 900_000
"""A task up to this size travels inside the job, which is 0.05 s sooner than a broadcast of its own
(PySpark itself broadcasts functions of 1 MiB and more)."""


@dataclass(frozen=True)
class StageSummary:
    """A training stage that ended well.

    Args:
        rows: Rows trained per epoch.
        seconds: From the first step to the last, on the slowest worker.
        read_s: To read the partition, on the slowest worker.
        transports: How workers reached the server.
        gpus: Rank -> addresses of the GPUs that it trained on.
        pids: Rank -> process that it trained in.
        members: Rank -> the model it trained, for a rule whose models never meet.
    """

    rows: int
    seconds: float
    read_s: float
    transports: frozenset[str]
    gpus: dict[int, tuple[str, ...]]
    pids: dict[int, int]
    members: dict[int, FloatArray] = field(default_factory=dict, repr=False)


class Run(Protocol):
    """How the driver takes part in a run: a parameter server, or a communicator's rank 0."""

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """What the workers report now, of the epochs from ``since_epoch`` on.

        Raises:
            TransportError: The server is gone.
        """

    def command(self, command: Command) -> None:
        """Tells the workers."""

    def pull(self) -> Any:
        """The workers' present weights as one flat buffer."""

    def optimizer_state(self) -> bytes:
        """The optimizer state at the end of the last epoch; empty if no worker has left one."""

    def checkpoint(self) -> tuple[int, Any, bytes] | None:
        """Epochs done, weights and optimizer state to begin again from; None: from the start."""

    def result(self, rows: list[Any]) -> Any:
        """The trained weights, given the result rows of the stage."""

    @property
    def strategy(self) -> Any:
        """The workers' recipe."""


class StageLost(Exception):
    """The stage's workers were lost, by no fault of the user's code; another try may do.

    Args:
        error: What to raise if there is no other try.
    """

    def __init__(self, error: SparkDLError) -> None:
        super().__init__(str(error))
        self.error = error
        self.epoch = 0


def train_stage(
    source: Source,
    model: Any,
    run: Run,
    task: TrainTask,
    monitor: FitMonitor,
    *,
    repartition: bool = True,
    barrier: bool = False,
    on_epoch: Callable[[int], None] | None = None,
) -> StageSummary:
    """Runs the training stage to its end and leaves the trained weights in ``model``.

    Args:
        source: The training (and validation) rows.
        model: The driver's model.
        run: The server or communicator.
        task: What the executors get.
        monitor: Progress bar, callbacks and History.
        repartition: Spread the rows over the workers; False takes the partitions as they are.
        barrier: All tasks start together, or none does.
        on_epoch: Called with the number of epochs done whenever one has ended (checkpoints).

    Returns:
        What the workers said at the end.

    Raises:
        WorkerError: A worker raised; with its traceback.
        DataError: A worker found that the data do not fit.
        TransportError: The server died.
        StageLost: Workers of a barrier stage were lost.
    """
    spark = source.spark
    rule = getattr(task.strategy, "rule", None)
    pickled = pickle_by_value({"task": task, "rule": rule, **vars(rule or task)})
    broadcast = None
    if len(pickled) > INLINE_BYTES and not is_connect(spark):
        broadcast = spark.sparkContext.broadcast(pickled)
    frame = spread(source, task.num_workers) if repartition else source.frame
    function = stage_function(pickled if broadcast is None else broadcast)
    stage = Stage(
        spark,
        lambda: frame.mapInArrow(function, RESULT_SCHEMA, barrier=barrier).collect(),
        f"sparkdl: fit {model.name}",
    )
    try:
        stage.start()
        stopped = _watch(stage, run, monitor, on_epoch)
        rows = _results(stage, run, barrier, task.num_workers)
        _raise_failures(rows, run, barrier)
        weights = run.result(rows)
        stopped = _last_news(run, monitor, on_epoch) or stopped
        if weights.size and (not stopped or monitor.stopped_inside):
            model_weights.write_model(model, model_weights.model_layout(model), weights)
        keeper = min((r.rank for r in rows if r.kind == "optimizer"), default=-1)
        state = b"".join(
            bytes(r.content) for r in rows if r.kind == "optimizer" and r.rank == keeper
        )
        if state and (not stopped or monitor.stopped_inside or not run.optimizer_state()):
            optimizer_state.load_optimizer_state(model, state)
        if getattr(model.optimizer, "use_ema", False) and not stopped:
            model.optimizer.finalize_variable_values(model.trainable_variables)
        done = {r.rank: json.loads(r.text) for r in rows if r.kind == "done"}
        if sum(d["rows"] for d in done.values()) == 0:
            raise DataError(
                "there are no rows to train on",
                expected="at least one row",
                received="0 rows in all partitions",
            )
        return StageSummary(
            rows=sum(d["rows"] for d in done.values()),
            seconds=max(float(d["seconds"]) for d in done.values()),
            read_s=max(float(d["read_s"]) for d in done.values()),
            transports=frozenset(d["transport"] for d in done.values()),
            gpus={rank: tuple(d["gpus"]) for rank, d in done.items()},
            pids={rank: int(d["pid"]) for rank, d in done.items()},
            members=_members(rows, task) if getattr(rule, "independent", False) else {},
        )
    finally:
        try:
            with contextlib.suppress(Exception):
                if stage.running:
                    run.command(Command(stop=True))
        finally:  # also if the user interrupts a second time
            stage.cancel()
            if broadcast is not None:
                with contextlib.suppress(Exception):
                    broadcast.destroy()


def _members(rows: list[Any], task: TrainTask) -> dict[int, FloatArray]:
    """Every rank's weights.

    Raises:
        WorkerError: A rank's are missing: its task was lost after it had said that it was done.
    """
    found: dict[int, list[bytes]] = {}
    for row in rows:
        if row.kind == "weights":
            found.setdefault(row.rank, []).append(row.content)
    for rank in range(task.num_workers):
        if rank not in found:
            raise WorkerError(rank, "its trained model was lost with its executor")
    return {r: np.frombuffer(b"".join(parts), np.float32) for r, parts in sorted(found.items())}


def _watch(
    stage: Stage, run: Run, monitor: FitMonitor, on_epoch: Callable[[int], None] | None
) -> bool:
    """Follows the stage until it ends; True if a callback stopped it."""
    stopped = False
    epochs_done = monitor.epochs_done
    failed_at: float | None = None
    wait_s = 0.02
    while not stage.wait(wait_s):
        wait_s = min(POLL_S, wait_s * 1.5)
        interrupts.check()
        progress = run.progress(monitor.epochs_done)
        if progress.failure is not None:
            # The others are told by the server; give the stage a moment to end by itself.
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > 10:
                raise _worker_error(progress.failure)
            continue
        if stopped:
            continue
        command = monitor.update(progress)
        if command is not None:
            run.command(command)
            stopped = command.stop
        if monitor.epochs_done > epochs_done:
            epochs_done = monitor.epochs_done
            if on_epoch is not None:
                on_epoch(epochs_done)
    return stopped


def _last_news(run: Run, monitor: FitMonitor, on_epoch: Callable[[int], None] | None) -> bool:
    """Epochs that ended between the last look and the end; True if a callback stops there."""
    before = monitor.epochs_done
    command = monitor.update(run.progress(monitor.epochs_done))
    if command is not None and command.learning_rate is not None:
        run.command(command)
    if monitor.epochs_done > before and on_epoch is not None:
        on_epoch(monitor.epochs_done)
    return command is not None and command.stop


def _results(stage: Stage, run: Run, barrier: bool, num_workers: int) -> list[Any]:
    if stage.error is None:
        return list(stage.result)
    if isinstance(stage.error, SparkDLError):
        raise stage.error
    refused = barrier_refusal(stage.error, num_workers)
    if refused is not None:
        raise refused from stage.error
    if barrier:
        described = described_in(stage.error)
        if described is not None:
            raise_failure(described["rank"], described)
        failure = run.progress().failure
        if failure is not None:
            raise _worker_error(failure)
    error = WorkerError(
        -1,
        f"Spark gave the training stage up: {_first_line(stage.error)}",
        str(stage.error),
        hint="a lost executor that cannot be replaced, or sparkdl not installed on executors",
    )
    if barrier:
        raise StageLost(error) from stage.error
    raise error from stage.error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _raise_failures(rows: list[Any], run: Run, barrier: bool) -> None:
    """Raises the root cause: the worker that failed first, not those it took with it."""
    failed = {r.rank: json.loads(r.text) for r in rows if r.kind == "failed"}
    if not failed:
        return
    if barrier:
        failed = {r: d for r, d in failed.items() if not d.get("lost")} or failed
        rank, described = min(failed.items())
        if described.get("lost"):  # a connection broke, and nobody knows why
            raise StageLost(_worker_error(_failure_of(rank, described)))
    first = None
    with contextlib.suppress(TransportError):
        first = run.progress().failure
    rank = first.rank if first is not None and first.rank in failed else min(failed)
    raise_failure(rank, failed[rank])


def raise_failure(rank: int, described: dict[str, Any]) -> NoReturn:
    """Raises what a task described: one of our errors as itself, any other as WorkerError."""
    beats = described.get("beats")
    cls = getattr(errors, described.get("type", ""), None)
    if beats is not None and cls is not None and not issubclass(cls, WorkerError):
        what = f"{beats['what']} (worker {rank})"
        raise cls(what, **{k: beats[k] for k in ("expected", "received", "hint")})
    raise _worker_error(_failure_of(rank, described))


def _failure_of(rank: int, described: dict[str, Any]) -> Failure:
    return Failure(rank, described.get("error", ""), described.get("traceback", ""))


def _worker_error(failure: Failure) -> WorkerError:
    return WorkerError(failure.rank, failure.error, failure.traceback)
