"""Real learners with a real server, or with a real all-reduce rule, as threads of one process.

The benchmarks of rules share this module: it needs no Spark and no network, so that hundreds of
small runs take minutes. Server runs use the library's own loop (``sparkdl.worker.train``);
all-reduce runs call the rule's exchange step by step, with ranks that are threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sparkdl.collective.rules.exchange_rule import ExchangeRule, GradientExchange, OptimizerExchange
from sparkdl.config import LoopSettings
from sparkdl.coordinator.settings import Settings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.ps.client import pull_center
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.testing.inproc import InprocParameterServer, connect_threads
from sparkdl.training.learning import MAX_STACK
from sparkdl.worker import train

Parts = Sequence[tuple[np.ndarray, np.ndarray]]
Pause = Callable[[], float]
TIMEOUT_S = 300.0


@dataclass
class Outcome:
    """What a run gives.

    Args:
        weights: The run's model; one per worker for an ensemble.
        curve: ``(rows trained by all workers, the run's weights then)``, once per ``mark`` rows.
        bytes_per_worker: All bytes that a worker received and sent (mean over workers).
        seconds: From the first worker's start to the last one's end.
        rows_by_worker: The rows that each worker trained on.
        losses: Of runs with a server: each epoch's mean loss while the workers trained.
    """

    weights: list[np.ndarray]
    curve: list[tuple[int, np.ndarray]] = field(default_factory=list)
    bytes_per_worker: float = 0.0
    seconds: float = 0.0
    rows_by_worker: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Trained on by all workers."""
        return sum(self.rows_by_worker)


class _Watch:
    """Counts the rows of all workers, and keeps the weights each time rank 0 passes a mark."""

    def __init__(self, every: int, read: Callable[[], np.ndarray], workers: int) -> None:
        self.rows = [0] * workers
        self.curve: list[tuple[int, np.ndarray]] = []
        self._losses: dict[int, np.ndarray] = {}
        self._every, self._read, self._next = every, read, every
        self._lock = threading.Lock()

    def add_loss(self, epoch: int, sums: np.ndarray) -> None:
        """Takes one worker's sum of losses and its weight."""
        with self._lock:
            self._losses[epoch] = self._losses.get(epoch, np.zeros(2)) + sums

    @property
    def losses(self) -> list[float]:
        """The mean loss of each epoch over all workers."""
        return [float(s[0] / s[1]) for _, s in sorted(self._losses.items())]

    def add(self, rows: int, rank: int) -> None:
        with self._lock:
            self.rows[rank] += rows
            total = sum(self.rows)
            due = rank == 0 and total >= self._next
            if due:
                self._next = (total // self._every + 1) * self._every
        if due:
            self.curve.append((total, self._read().copy()))


class _Watched(ServerSynchronizer):
    """A worker's connection to the server that reports each exchange to the watch."""

    watch: _Watch
    rank: int
    pause: Pause | None = None
    cuts_stacks = False  # type: ignore[assignment]  # each window is watched, and paused, by itself

    def train(self, learner: Any, window: Any | None, report: Any) -> None:
        if self.pause is None:
            super().train(learner, window, report)
        elif window is not None and self.every_batch:  # each batch of the stack is a round
            for index in range(window.num_batches):
                time.sleep(self.pause())
                part, left = window.part(index, 1), window.num_batches - 1 - index
                own = replace(
                    report, batches=1, rows=part.num_rows, batches_done=report.batches_done - left,
                    windows_done=report.windows_done - left,
                )  # fmt: skip
                super().train(learner, part, own)
        else:
            time.sleep(sum(self.pause() for _ in range(report.batches)))
            super().train(learner, window, report)
        self.watch.add(report.rows, self.rank)

    def end_epoch(self, learner: Any, epoch: int, metrics: Any, *others: Any) -> None:
        self.watch.add_loss(epoch, metrics[:2])
        super().end_epoch(learner, epoch, metrics, *others)


def run_with_server(
    learners: Sequence[Any],
    parts: Parts,
    rule: Any,
    *,
    epochs: int,
    batch_size: int,
    window: int,
    seed: int = 0,
    mark: int = 1 << 60,
    codec: Any = None,
    pauses: Sequence[Pause] = (),
    stop_after_s: float | None = None,
) -> Outcome:
    """Trains over a parameter server; the learners hold equal weights.

    Args:
        learners: One per worker.
        parts: Rows of each worker.
        rule: One of ``sparkdl.rules``.
        epochs: How often each worker trains its part.
        batch_size: Rows per batch of each worker.
        window: Batches between two exchanges; see ``LoopSettings``.
        seed: Gives the order of the rows.
        mark: Rows between two points of the curve.
        codec: One of ``sparkdl.codecs``, or None.
        pauses: For each worker, a function that gives how many seconds longer its next batch takes.
        stop_after_s: Seconds after which all workers are asked to stop.
    """
    count = len(parts)
    rule = rule.bind(count)
    layout = learners[0].layout
    center = np.empty(layout.size, np.float32)
    learners[0].read_weights(center)
    config = ServerConfig(
        layout, rule, count, codec=None if codec is None else codec.bind(count),
        settings=Settings(count, gather=count),  # begin together, as in Spark
    )  # fmt: skip
    settings = LoopSettings(epochs=epochs, batch_size=batch_size, window=window)
    on_workers = rule.blocking and rule.payload == "gradient"
    moved = [0] * count
    with InprocParameterServer(config, center) as server:

        def read_local() -> np.ndarray:
            learners[0].read_weights(center_copy)
            return center_copy

        center_copy = np.empty(layout.size, np.float32)
        with server.driver() as driver:
            read_center = read_local if on_workers else lambda: pull_center(driver)
            watch = _Watch(mark, read_center, count)

            def work(rank: int) -> None:
                rows = rows_from_numpy(*parts[rank])
                with server.client(rank) as client:
                    synchronizer = _Watched(rule, client, layout, False)
                    synchronizer.watch, synchronizer.rank = watch, rank
                    synchronizer.pause = pauses[rank] if pauses else None
                    train(
                        learners[rank], synchronizer,
                        Batches(rows, batch_size, rank=rank, seed=seed), settings,
                        num_rows=len(rows), num_workers=count,
                    )  # fmt: skip
                    moved[rank] = client.session.bytes_sent + client.session.bytes_received

            clock = None
            if stop_after_s is not None:
                clock = threading.Timer(stop_after_s, driver.control, kwargs={"stop": True})
                clock.start()
            seconds = _together(work, count)
            if clock is not None:
                clock.cancel()
                clock.join()
            if rule.independent or on_workers:
                weights = [_weights_of(learner) for learner in learners]
                weights = weights if rule.independent else weights[:1]
            else:
                weights = [pull_center(driver)]
    return Outcome(
        weights, watch.curve, float(np.mean(moved)), seconds, watch.rows, watch.losses
    )  # fmt: skip


def run_with_all_reduce(
    learners: Sequence[Any],
    parts: Parts,
    rule: ExchangeRule,
    optimizer: dict[str, Any],
    *,
    epochs: int,
    batch_size: int,
    window: int,
    seed: int = 0,
    mark: int = 1 << 60,
    pauses: Sequence[Pause] = (),
    stop_after_s: float | None = None,
) -> Outcome:
    """Trains with a rule of ``sparkdl.collective.rules``; arguments as :func:`run_with_server`.

    Bytes are those that a ring would move for each operation. The parts are equally long.
    """
    count = len(parts)
    rule = rule.bind(count, optimizer)
    layout = learners[0].layout
    steps = -(-max(len(x) for x, _ in parts) // batch_size)
    communicators = [RingBytes(c) for c in connect_threads(count, timeout_s=TIMEOUT_S)]
    watch = _Watch(mark, lambda: current[0], count)
    current = [np.empty(0, np.float32)]
    results: list[Any] = [None] * count
    stop = _Stop(stop_after_s)

    def work(rank: int) -> None:
        learner, communicator = learners[rank], communicators[rank]
        exchange = rule.open(communicator, layout)
        batches = Batches(rows_from_numpy(*parts[rank]), batch_size, rank=rank, seed=seed)
        kind = _GradientSteps
        if isinstance(exchange, OptimizerExchange):
            kind = _OptimizerSteps
        elif not isinstance(exchange, GradientExchange):
            kind = _WeightSteps
        driver = kind(learner, exchange, window, rule.name == "adaptive_local_sgd")
        driver.pause = pauses[rank] if pauses else None
        taken = 0
        for epoch in range(epochs):
            with closing(batches.stacks(epoch, driver.piece)) as pieces:
                left = steps
                for piece in pieces:
                    left -= piece.num_batches
                    counted = driver.train(piece, last=left == 0)
                    if rank == 0:
                        current[0] = driver.present()
                    watch.add(counted, rank)
                    taken += 1
                    if stop.after(taken, rank):
                        break
                else:
                    continue
            break
        driver.finish()
        communicator.barrier()
        exchange.close()
        results[rank] = driver.present()

    try:
        seconds = _together(work, count, lambda rank: communicators[rank].close())
    finally:
        for communicator in communicators:
            communicator.close()
    moved = float(np.mean([c.moved_bytes for c in communicators]))
    return Outcome([results[0]], watch.curve, moved, seconds, watch.rows)


class _Stop:
    """All ranks stop after the same step, without waiting for each other more than the rule does.

    Rank 0 looks at the clock; no rank can be more steps ahead of it than a rule lets it.
    """

    AHEAD = 6

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds
        self._last: int | None = None

    def after(self, step: int, rank: int) -> bool:
        over = self._at is not None and time.monotonic() > self._at
        if rank == 0 and over and self._last is None:
            self._last = step + self.AHEAD
        return self._last is not None and step >= self._last


class _Steps:
    """How a rank trains a piece with one kind of exchange."""

    piece = 1
    pause: Pause | None = None

    def __init__(self, learner: Any, exchange: Any, window: int, adaptive: bool) -> None:
        self.learner, self.exchange = learner, exchange
        self.flat = _weights_of(learner)

    def present(self) -> np.ndarray:
        return _weights_of(self.learner)

    def finish(self) -> None:
        pass

    def _compute(self, batch: Any) -> Any:
        def compute(out: np.ndarray) -> None:
            if self.pause is not None:
                time.sleep(self.pause())
            self.learner.gradients(batch, out)

        return [(compute, batch.num_rows)]


class _GradientSteps(_Steps):
    def train(self, batch: Any, last: bool) -> int:
        """Trains one step; the rows of a batch that was dropped do not count."""
        before = getattr(self.exchange, "dropped", 0)
        self.exchange.take_step(self._compute(batch), self.learner.apply_gradients)
        dropped = getattr(self.exchange, "dropped", 0) > before
        return 0 if dropped else int(batch.num_rows)


class _OptimizerSteps(_Steps):
    def train(self, batch: Any, last: bool) -> int:
        rows = self.exchange.fill(self._compute(batch))
        self.exchange.step(self.learner.weights_within, rows, self.learner.optimizer.learning_rate)
        self.learner.write_weights(self.exchange.buffer)
        return int(rows)


class _WeightSteps(_Steps):
    def __init__(self, learner: Any, exchange: Any, window: int, adaptive: bool) -> None:
        super().__init__(learner, exchange, window, adaptive)
        exchange.start(self.flat)
        self._window = 1 if adaptive else window
        self.piece = 1 if adaptive else -(-window // -(-window // MAX_STACK))
        self._rate = learner.optimizer.learning_rate
        self._batches = self._rows = 0
        self._seen = (0.0, 0.0)

    def train(self, piece: Any, last: bool) -> int:
        if self.pause is not None:
            time.sleep(sum(self.pause() for _ in range(piece.num_batches)))
        self.learner.train(piece)
        self._batches += piece.num_batches
        self._rows += piece.num_rows
        if self._batches < self._window and not last:
            return int(piece.num_rows)
        self.learner.read_weights(self.flat)
        self._window = (
            self.exchange.after_window(self.flat, self._rows, self._loss(), self._rate)
            or self._window
        )
        self.learner.write_weights(self.flat)
        self._batches = self._rows = 0
        return int(piece.num_rows)

    def _loss(self) -> float:
        """Mean loss since the last exchange, from the learner's running (sum, count)."""
        total, count = (float(v) for v in self.learner.metrics.state()[:2])
        loss = (total - self._seen[0]) / max(count - self._seen[1], 1e-9)
        self._seen = (total, count)
        return loss

    def present(self) -> np.ndarray:
        return self.exchange.center.copy()

    def finish(self) -> None:
        self.exchange.finish(self.flat)


def warm_up(learner: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Compiles a learner's steps for batches of any size; it must be reset afterwards."""
    flat = np.empty(learner.layout.size, np.float32)
    for batch in (4, 6, 8):
        batches = Batches(rows_from_numpy(x[: 2 * batch], y[: 2 * batch]), batch, shuffle=False)
        for window in (1, 2):
            with closing(batches.stacks(0, window)) as pieces:
                for piece in pieces:
                    if window == 1:
                        learner.gradients(piece, flat)
                        learner.apply_gradients(flat)
                    learner.train(piece)


class RingBytes:
    """A communicator that counts what a ring would send and receive for each operation."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.moved_bytes = inner, 0.0
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size

    def _charge(self, nbytes: float, trips: float) -> None:
        self.moved_bytes += 2 * trips * nbytes * (self.size - 1) / self.size

    def all_reduce(self, array: Any, *args: Any, **options: Any) -> Any:
        self._charge(np.asarray(array).nbytes, 2)
        return self._inner.all_reduce(array, *args, **options)

    def all_reduce_async(self, array: Any, *args: Any, **options: Any) -> Any:
        self._charge(np.asarray(array).nbytes, 2)
        return self._inner.all_reduce_async(array, *args, **options)

    def reduce_scatter(self, array: Any, *args: Any, **options: Any) -> Any:
        self._charge(np.asarray(array).nbytes, 1)
        return self._inner.reduce_scatter(array, *args, **options)

    def all_gather(self, array: Any) -> Any:
        told = self._inner.all_gather(array)
        self._charge(sum(a.nbytes for a in told), 1)
        return told

    def broadcast(self, array: Any, *args: Any, **options: Any) -> Any:
        self._charge(np.asarray(array).nbytes, 1)
        return self._inner.broadcast(array, *args, **options)

    def barrier(self) -> None:
        self._inner.barrier()

    def group(self, ranks: Any) -> RingBytes:
        made = RingBytes(self._inner.group(ranks))
        made._charge = self._charge  # type: ignore[method-assign]
        return made

    def close(self) -> None:
        self._inner.close()


def _weights_of(learner: Any) -> np.ndarray:
    flat = np.empty(learner.layout.size, np.float32)
    learner.read_weights(flat)
    return flat


def _together(
    work: Callable[[int], None], count: int, abort: Callable[[int], None] | None = None
) -> float:
    """Runs ``work(rank)`` in threads; the first exception of any is raised."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            if abort is not None:
                abort(rank)

    threads = [threading.Thread(target=guarded, args=(r,), daemon=True) for r in range(count)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, TIMEOUT_S - (time.perf_counter() - started)))
    seconds = time.perf_counter() - started
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a worker is not done after {TIMEOUT_S:g} s")
    return seconds
