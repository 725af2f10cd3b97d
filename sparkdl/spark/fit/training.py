"""The driver's side of one fit: one task, one stage, one collect, watched while it runs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from sparkdl.errors import DataError, SparkDLError, TransportError, WorkerError
from sparkdl.failures import RankFailure, RanksLost, root_cause
from sparkdl.files.run_state import RunState
from sparkdl.launch import interrupts
from sparkdl.launch.task import Result, failures_of
from sparkdl.progress.monitor import Command, FitMonitor
from sparkdl.spark.executor.trainer import TrainedRank, TrainTask
from sparkdl.spark.fit.plan import FitPlan
from sparkdl.spark.fit.training_run import Run
from sparkdl.spark.forms.shared_rows import SharedRows
from sparkdl.spark.forms.sources import Source, dealt
from sparkdl.spark.runs.capacity import PartitionsError, SparkJob
from sparkdl.spark.runs.launcher import SparkLauncher, SparkRanks
from sparkdl.spark.session.spark_errors import heap_full, was_cancelled
from sparkdl.training.phases import ServerUsage, Usage, too_many_workers

POLL_S = 0.1
_LAST_STEP_S = 4.0
"""Seconds that workers have after an interrupt to end their step."""
FAILED_GRACE_S = 10.0
"""Seconds that the stage has to end by itself after a worker's failure."""


@dataclass(frozen=True)
class StageSummary:
    """A training stage that ended well.

    Args:
        rows: Rows trained per epoch.
        seconds: From the first step to the last, on the slowest worker.
        read_s: To read the partition, on the slowest worker.
        transports: How workers reached the server; in ``'allreduce'`` the communicator.
        gpus: Rank -> addresses of the GPUs that it trained on.
        pids: Rank -> process that it trained in.
        members: Rank -> the model it trained, for a rule whose models never meet.
        refused: Updates of all workers that were refused because they were not finite.
        rank_rows: Rank -> rows that it trained per epoch.
        usage: Rank -> what its time went into.
        epochs: Epochs that the stage was to train.
        counted: The part of the workers' changes that counted, a mean over exchanges and workers.
            Below 1 where changes are added up and were too much together: then the learning rate is
            high for this number of workers that do not wait.
        label_mean: The mean of all workers' labels, see :func:`sparkdl.data.rows.label_mean`.
        off_center: How far each input is from having mean 0, from 0 to 1: see
            :func:`sparkdl.data.rows.off_center`.
        servers: The servers that held the weights together, in order; empty for one server.
    """

    rows: int
    seconds: float
    read_s: float
    transports: frozenset[str]
    gpus: dict[int, tuple[str, ...]]
    pids: dict[int, int]
    members: dict[int, RunState] = field(default_factory=dict, repr=False)
    refused: int = 0
    rank_rows: dict[int, int] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    epochs: int = 0
    counted: float = 1.0
    label_mean: tuple[float, ...] = ()
    off_center: Mapping[str, float] = field(default_factory=dict)
    servers: tuple[ServerUsage, ...] = ()

    def __str__(self) -> str:
        workers = "1 worker" if len(self.rank_rows) == 1 else f"{len(self.rank_rows)} workers"
        by = ", ".join(sorted(self.transports))
        lines = [
            f"{self.rows:,} rows per epoch, {workers} by {by}: {self.seconds:.1f} s of training; "
            f"{self.read_s:.1f} s to read the rows"
        ]
        for rank, usage in sorted(self.usage.items()):
            gpus = ", ".join(self.gpus.get(rank, ()))
            lines.append(
                f"rank {rank:>3}  {self.rank_rows.get(rank, 0):>10,} rows  "
                f"{usage.memory_bytes / 1e6:,.0f} MB" + (f"  GPU {gpus}" if gpus else "")
            )
        for number, server in enumerate(self.servers):
            rows = f"  {server.table_rows:,} rows of tables" if server.table_rows else ""
            if server.staleness:
                rows += f", {server.staleness:.2g} steps of others between pull and push"
            lines.append(
                f"server {number:>1}  {server.host}  {server.bytes_received / 1e6:,.0f} MB in, "
                f"{server.bytes_sent / 1e6:,.0f} MB out  {server.memory_bytes / 1e6:,.0f} MB{rows}"
            )
        if self.refused:
            lines.append(f"{self.refused} updates were refused: they were not finite")
        outrun = too_many_workers(self.trained_usage)
        return "\n".join(lines if outrun is None else [*lines, outrun])

    @property
    def trained_usage(self) -> dict[int, Usage]:
        """Rank -> what its time went into, of ranks that had rows."""
        return {rank: usage for rank, usage in self.usage.items() if self.rank_rows.get(rank)}


class StageLost(Exception):
    """The stage's workers, or its server, were lost by no fault of the user's code: another attempt
    may do.

    Args:
        error: What to raise if there is no other attempt.
    """

    def __init__(self, error: SparkDLError) -> None:
        super().__init__(str(error))
        self.error = error


Spread = Callable[[], tuple[object, SharedRows | None]]


@contextlib.contextmanager
def spreading(
    source: Source, num_workers: int, *, in_order: bool, repartition: bool
) -> Iterator[Spread | None]:
    """Within, a call gives what :meth:`Source.spread` does, and waits for it.

    Rows to validate on are collected from here on, beside what the driver does meanwhile. None:
    the partitions stay as they are.
    """
    spread = functools.partial(source.spread, num_workers, in_order=in_order)
    if not (repartition or source.files):
        yield None
    elif not source.collects(num_workers):
        yield spread
    else:
        job = SparkJob(source.spark, spread, "sparkdl: rows to validate on")
        try:
            job.start()
            yield functools.partial(_spread_by, job)
        finally:
            job.cancel()


def _spread_by(job: SparkJob) -> tuple[object, SharedRows | None]:
    while not job.wait(POLL_S):
        pass
    if job.error is not None:
        raise job.error
    frame, rows = job.result
    return frame, rows


@dataclass(frozen=True)
class FitStage:
    """One stage of a fit: what its workers train, and who follows them on the driver.

    Args:
        plan: Its model gets the trained weights.
        run: The driver's end of the run that the workers join.
        task: The work of each of them.
    """

    plan: FitPlan
    run: Run
    task: TrainTask
    monitor: FitMonitor

    def train(self, spread: Spread | None) -> StageSummary:
        """Runs the stage to its end and leaves the trained weights in the driver's model.

        Args:
            spread: Spreads the rows over the workers, see :func:`spreading`.

        Returns:
            What the workers returned.

        Raises:
            WorkerError: A worker raised; with its traceback.
            DataError: A worker found that the data do not fit.
            TransportError: The server died.
            StageLost: Workers of a barrier stage were lost.
        """
        source = self.plan.source
        if spread is None:
            return self._train_on(source.frame, source.shared)
        frame, rows = spread()
        try:
            return self._train_on(frame, rows)
        except PartitionsError:
            again = dealt(
                source.frame, self.task.num_workers, in_order=not self.task.settings.shuffle,
                group=source.group_column,
            )  # fmt: skip
            return self._train_on(again, None)  # it was not cached

    def _train_on(self, frame: object, rows: SharedRows | None) -> StageSummary:
        plan, run, monitor = self.plan, self.run, self.monitor
        launcher = SparkLauncher(
            frame, self.task.num_workers, barrier=self._is_barrier,
            description=f"sparkdl: fit {plan.trained.model.name}", noun="training stage",
            profile=plan.profile, rows=rows,
        )  # fmt: skip
        with interrupts.keeping(), interrupts.CleanStack() as stack:
            ranks = stack.begin(launcher.launch(self.task))
            try:
                if monitor.epochs_done > self.task.settings.first_epoch:  # whose callbacks have run
                    run.command(Command(release=monitor.epochs_done - 1))
                stopped = self._watch(ranks)
                results = self._results(ranks)
                self._raise_failures(results)
                trained = TrainedRank.all_of(results)
                self._keep(trained, stopped)
                spans = {rank: t.spans for rank, t in trained.items() if t.spans is not None}
                monitor.end_workers(run.progress(monitor.epochs_done), spans)
                return _summary(trained, self.task, run)
            except BaseException as error:
                if was_interrupted(error) and not self.task.strategy.independent:
                    self._keep_so_far(ranks)
                raise
            finally:
                with contextlib.suppress(Exception):
                    if ranks.running:
                        run.command(Command(stop=True))

    @property
    def _is_barrier(self) -> bool:
        """Whether all tasks start together, or none does."""
        return not self.plan.config.with_server

    def _watch(self, ranks: SparkRanks) -> bool:
        """Follows the ranks until they have ended; True if a callback stopped them."""
        run, monitor = self.run, self.monitor
        stopped = False
        epochs_done = monitor.epochs_done
        failed_at: float | None = None
        wait_s = 0.02
        while not ranks.wait(wait_s):
            wait_s = min(POLL_S, wait_s * 1.5)
            interrupts.check()
            if monitor.lines_due():
                monitor.hear(run.take_lines())
            progress = run.progress(monitor.epochs_done)
            if progress.failure is not None:
                failed_at = failed_at or time.monotonic()  # the server tells the other workers
                if time.monotonic() - failed_at > FAILED_GRACE_S:
                    raise progress.failure.library_error()
                continue
            if stopped:
                continue
            command = monitor.update(progress)
            if command is not None:
                run.command(command)
                stopped = command.stop
            if monitor.epochs_done > epochs_done:
                epochs_done = monitor.epochs_done
                self._save_checkpoint()
        return stopped

    def _results(self, ranks: SparkRanks) -> list[Result]:
        try:
            return ranks.results()
        except RankFailure as error:
            raise error.failure.library_error() from None
        except RanksLost as error:
            # After a full heap another stage would find the same rows.
            if not self._is_barrier or heap_full(str(error)):
                raise
            failure = self.run.progress().failure
            if failure is not None:
                raise failure.library_error() from error
            raise StageLost(error) from error.__cause__

    def _raise_failures(self, results: list[Result]) -> None:
        """Raises the first cause: what the worker raised that failed before the others."""
        failures = failures_of(results)
        cause = root_cause(failures)
        if cause is None:
            return
        if self._is_barrier and cause.secondary:  # a connection broke, and nobody knows why
            raise StageLost(cause.worker_error())
        first = None
        with contextlib.suppress(TransportError):
            first = self.run.progress().failure
        rank = cause.rank if first is None else first.rank
        raise next((f for f in failures if f.rank == rank), cause).library_error()

    def _keep(self, trained: Mapping[int, TrainedRank], stopped: bool) -> None:
        """Leaves the trained weights and all that goes with them in the driver's model."""
        state, model = self.run.result(trained), self.plan.trained
        if not stopped or self.monitor.stopped_inside:
            model.take(state)
        elif not model.has_optimizer:  # stopped before a worker had left one
            rule = b"" if model.slots is None else state.rule
            model.take(replace(state, weights=RunState(0).weights, rule=rule))
        self._last_epochs()  # only now: callbacks may write to the trained weights

    def _last_epochs(self) -> None:
        """Shows epochs that ended after the last look."""
        run, monitor = self.run, self.monitor
        before = monitor.epochs_done
        if monitor.lines_due(last=True):
            monitor.hear(run.take_lines())
        command = monitor.update(run.progress(monitor.epochs_done))
        if command is not None and command.learning_rate is not None:
            run.command(command)
        if monitor.epochs_done > before:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        checkpoints, trained = self.plan.checkpoints, self.plan.trained
        if checkpoints is None:
            return
        if not self.monitor.loads:
            trained.take(self.run.state())
        trained.save(checkpoints, self.monitor.epochs_done, self.monitor.rate_between_epochs)

    def _keep_so_far(self, ranks: SparkRanks) -> None:
        """Leaves in the driver's model what the workers had trained when the user ended the fit.

        Workers that still run get some seconds to end their step and to leave the optimizer's
        state. A second interrupt ends these. Without them the weights are those of the last
        exchange (with a server) or of the last epoch, and the optimizer's state is what a worker
        left last.
        """
        run, monitor = self.run, self.monitor
        with contextlib.suppress(KeyboardInterrupt, SparkDLError):
            if not run.progress().joined:  # nothing was trained
                return
            if ranks.running:
                run.command(Command(stop=True))
                ranks.wait(_LAST_STEP_S)
        with contextlib.suppress(KeyboardInterrupt, SparkDLError), interrupts.held():
            progress = run.progress(monitor.epochs_done)
            self.plan.trained.take(run.state())
            monitor.end_finished(progress)


def was_interrupted(error: BaseException) -> bool:
    """Whether the user ended the fit: by an interrupt, or by cancelling its job in Spark."""
    cause = error.__cause__
    cancelled = isinstance(error, WorkerError) and cause is not None and was_cancelled(cause)
    return isinstance(error, KeyboardInterrupt) or cancelled


def _summary(trained: Mapping[int, TrainedRank], task: TrainTask, run: Run) -> StageSummary:
    rows = sum(t.rows for t in trained.values())
    if rows == 0:
        raise DataError(
            "there are no rows to train on", expected="at least one row",
            received="0 rows in all partitions",
        )  # fmt: skip
    members = {}
    if task.strategy.independent:
        for rank in range(task.num_workers):
            state = run.member(rank)
            if state is None:
                raise WorkerError(rank, "it has left no trained model")
            members[rank] = state
    return StageSummary(
        rows=rows, seconds=max(t.seconds for t in trained.values()),
        read_s=max(t.read_s for t in trained.values()),
        transports=frozenset(t.transport for t in trained.values()),
        gpus={rank: t.gpus for rank, t in trained.items()},
        pids={rank: t.pid for rank, t in trained.items()}, members=members,
        refused=sum(t.refused for t in trained.values()),
        rank_rows={rank: t.rows for rank, t in trained.items()},
        usage={rank: t.usage for rank, t in trained.items()},
        epochs=task.settings.epochs - task.settings.first_epoch,
        counted=sum(t.counted for t in trained.values()) / len(trained),
        label_mean=_label_mean(list(trained.values()), rows),
        off_center=_off_center(list(trained.values()), rows), servers=run.servers(),
    )  # fmt: skip


def _off_center(trained: list[TrainedRank], rows: int) -> dict[str, float]:
    """Each input's, a mean over all rows."""
    found: dict[str, float] = {}
    for one in trained:
        for name, part in one.off_center.items():
            found[name] = found.get(name, 0.0) + part * one.rows / rows
    return found


def _label_mean(trained: list[TrainedRank], rows: int) -> tuple[float, ...]:
    """The mean over all rows of what each rank found in its own; empty if a rank found nothing."""
    with_rows = [t for t in trained if t.rows]
    if len({len(t.label_mean) for t in with_rows}) != 1:
        return ()
    columns = zip(*(t.label_mean for t in with_rows), strict=True)
    shares = [t.rows / rows for t in with_rows]
    return tuple(sum(s * v for s, v in zip(shares, c, strict=True)) for c in columns)
