"""THE LOOP: what every worker runs, whatever the model, the transport and the rule.

The loop knows three things by their protocols only: a *learner* (the model), *batches* (the
partition) and a *synchronizer* (how updates travel). It runs without Spark and without a network.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing

import numpy as np
import numpy.typing as npt

from sparkdl.config import AUTO_WINDOW, EPOCH_WINDOW, LoopSettings
from sparkdl.protocols import BatchSource, BatchStack, Learner, Report, Start, Synchronizer

MAX_PIECE = 16
"""Batches in one compiled call at most: more would gain nothing and take memory for the rows."""
PIECE_BYTES = 64 << 20
"""Rows of one compiled call at most (two are in memory at a time), but at least one batch."""
MOST_STALE = 32
"""Batches that all workers together train between two exchanges of each, with the automatic window:
so many changes that do not know of each other still add up well."""


def train(
    learner: Learner,
    synchronizer: Synchronizer,
    batches: BatchSource,
    settings: LoopSettings,
    *,
    validation: BatchSource | None = None,
    num_rows: int = 0,
    num_workers: int = 1,
) -> float:
    """Trains ``learner`` on ``batches`` until the settings' epochs are done or the driver stops.

    Every row is trained once per epoch, the last partial batch included.

    Args:
        learner: See :class:`sparkdl.protocols.Learner`.
        synchronizer: How updates travel.
        batches: This worker's rows.
        settings: Epochs, window and so on.
        validation: Rows to evaluate at the end of each epoch.
        num_rows: Rows in ``batches``.
        num_workers: Workers of the run (for learning-rate schedules).

    Returns:
        Seconds from the first step to the last, waits for others included.
    """
    loop = _Loop(learner, synchronizer, batches, settings, validation, num_workers)
    start = synchronizer.start(learner, num_rows, batches.steps_per_epoch, loop.windows_per_epoch)
    began = time.perf_counter()
    if start.done:
        return 0.0
    loop.run(start)
    seconds = time.perf_counter() - began
    synchronizer.finish(learner)
    return seconds


def auto_window(steps_per_epoch: int, num_workers: int) -> int:
    """Batches between two exchanges where the user names none.

    Longer gains no speed; more than a sixteenth of an epoch learns worse, and so do more batches of
    all workers together than :data:`MOST_STALE` (ADR 0009).

    Args:
        steps_per_epoch: Batches of this worker's epoch.
        num_workers: Ranks in all.

    >>> [auto_window(1000, p) for p in (1, 2, 4, 8, 64)]
    [16, 16, 8, 4, 1]
    """
    return max(1, min(MAX_PIECE, steps_per_epoch // 16, MOST_STALE // num_workers))


class _Loop:
    """One run of the loop. A long window is trained in pieces, a compiled call each."""

    def __init__(
        self,
        learner: Learner,
        synchronizer: Synchronizer,
        batches: BatchSource,
        settings: LoopSettings,
        validation: BatchSource | None,
        num_workers: int,
    ) -> None:
        self.learner, self.synchronizer, self.batches = learner, synchronizer, batches
        self.settings, self.validation, self.num_workers = settings, validation, num_workers
        window = settings.window
        if window == EPOCH_WINDOW:
            window = max(1, batches.steps_per_epoch)
        elif window == AUTO_WINDOW:
            window = auto_window(batches.steps_per_epoch, num_workers)
        longest = _longest_piece(batches)
        if synchronizer.every_batch:
            window = longest
        self.pieces = -(-window // longest)
        self.piece = -(-window // self.pieces)
        self.steps = 0
        self.rate: float | None = None
        self.next_report = 0.0
        self.first_report = True

    @property
    def windows_per_epoch(self) -> int:
        """Exchanges in one epoch of this worker; the smaller last batch is a piece of its own."""
        full, total = self.batches.full_batches, self.batches.steps_per_epoch
        if self.synchronizer.every_batch:
            return total
        pieces = -(-full // self.piece) + (total - full)
        if self.settings.window == EPOCH_WINDOW:
            return min(1, pieces)
        return -(-pieces // self.pieces)

    def run(self, start: Start) -> None:
        self.first_step = self.learner.step
        self.learning_rate = self.learner.learning_rate
        position = start.position
        for epoch in range(max(start.epoch, self.settings.first_epoch), self.settings.epochs):
            if self.synchronizer.stopped:
                return
            self.learner.reset_metrics()
            if not self._train_epoch(epoch, position, start.windows_per_epoch):
                return
            position = 0
            held_out = None
            if self.validation is not None:
                pieces = self.validation.stacks(0, _longest_piece(self.validation))
                held_out = self.learner.evaluate(pieces)
            if self.settings.keep_state:
                self.synchronizer.keep_state(self.learner, epoch + 1)
            self.synchronizer.end_epoch(
                self.learner,
                epoch,
                self.learner.metric_state(),
                held_out,
                self.settings.wait_for_driver,
            )
            self._follow_driver()

    def _train_epoch(self, epoch: int, position: int, together: int | None) -> bool:
        """Trains one epoch from ``position`` on; False if the driver stopped it."""
        total = self.batches.steps_per_epoch
        windows_done = position
        inside = self.synchronizer.every_batch
        batches_done = position
        if together is not None and not inside:
            batches_done = position * self.pieces * self.piece
        batches_done = min(batches_done, total)
        pieces = batches = rows = 0
        whole_epoch = self.settings.window == EPOCH_WINDOW and not inside
        with closing(self._pieces(epoch, batches_done)) as windows:
            for window in windows:
                pieces += 1
                batches += window.num_batches
                rows += window.num_rows
                batches_done += window.num_batches
                self.steps += window.num_batches
                exchange = batches_done == total or (pieces == self.pieces and not whole_epoch)
                windows_done += window.num_batches if inside else exchange
                report = self._report(epoch, batches_done, windows_done, batches, rows)
                if exchange:
                    self.synchronizer.train(self.learner, window, report)
                    pieces = batches = rows = 0
                else:
                    self.synchronizer.train_on(self.learner, window, report)
                self._follow_schedule()
                self._follow_driver()
                if self.synchronizer.stopped:
                    return False
        while together is not None and windows_done < together:
            windows_done += 1
            report = self._report(epoch, batches_done, windows_done, 0, 0)
            self.synchronizer.train(self.learner, None, report)
            self._follow_driver()
            if self.synchronizer.stopped:
                return False
        return True

    def _pieces(self, epoch: int, first_batch: int) -> Generator[BatchStack]:
        yield from self.batches.stacks(epoch, self.piece, first_batch)

    def _report(
        self, epoch: int, batches_done: int, windows_done: int, batches: int, rows: int
    ) -> Report:
        return Report(
            epoch=epoch,
            batches_done=batches_done,
            windows_done=windows_done,
            batches=batches,
            rows=rows,
            learning_rate=self.learning_rate,
            metrics=self._live_metrics(),
        )

    def _follow_schedule(self) -> None:
        if self.settings.follow_schedule and self.learner.has_schedule:
            self.learner.set_step(self.first_step + self.steps * self.num_workers)
            self.learning_rate = self.learner.learning_rate

    def _live_metrics(self) -> npt.NDArray[np.float64] | None:
        now = time.monotonic()
        if now < self.next_report or self.first_report:  # metrics exist after the first step
            self.first_report = False
            return None
        self.next_report = now + self.settings.report_interval_s
        state: npt.NDArray[np.float64] = self.learner.metric_state()
        return state

    def _follow_driver(self) -> None:
        rate = self.synchronizer.learning_rate
        if rate is not None and rate != self.rate:
            self.learner.set_learning_rate(rate)
            self.rate = self.learning_rate = rate


def _longest_piece(batches: BatchSource) -> int:
    """Batches in one compiled call: a power of two, so that it divides :data:`MAX_PIECE`."""
    fitting = PIECE_BYTES // max(1, batches.batch_bytes)
    return min(MAX_PIECE, 1 << max(0, fitting.bit_length() - 1))
