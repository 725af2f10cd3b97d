"""The training loop that every worker runs, whatever the model, the transport and the rule.

The loop knows three things by their protocols only: a *learner* (the model), *batches* (this
worker's rows) and a *synchronizer* (how updates travel). It needs neither Spark nor a network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Generic, TypeVar

from sparkdl.config import AUTO_WINDOW, EPOCH_WINDOW, LoopSettings
from sparkdl.errors import DataError, ModelError, SparkDLError
from sparkdl.training.learning import MAX_STACK, BatchSource, BatchStack, Learner
from sparkdl.training.phases import current_clock
from sparkdl.training.reports import MetricState, Report
from sparkdl.training.syncing import Start, Synchronizer
from sparkdl.weights import NotFiniteError, is_finite

L = TypeVar("L", bound=Learner)

STACK_BYTES = 64 << 20
"""Most bytes of one stack's rows (two stacks are in memory at a time), but at least a batch."""
_KEEP_S = 2.0
"""Seconds after which a worker that trains on its own leaves its optimizer's state with the driver
at an epoch's end, also where nobody asked for it: what a fit has when its job is cancelled."""
MOST_STALE = 32
"""Batches that all workers together train between two exchanges of each, with the automatic window:
up to this number, changes that do not know of each other still add up well."""


def train(
    learner: L,
    synchronizer: Synchronizer[L],
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
        synchronizer: How updates travel.
        batches: This worker's rows.
        settings: Epochs, window and so on.
        validation: Rows to evaluate at the end of each epoch.
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
    with loop.explained():
        synchronizer.finish(learner, settings.epochs)
    return seconds


def auto_window(steps_per_epoch: int, num_workers: int) -> int:
    """Batches between two exchanges where the user names none.

    A longer window gains no speed. One of more than a sixteenth of an epoch learns worse, and so
    do windows in which all workers together train more than :data:`MOST_STALE` batches (ADR 0009).

    Args:
        steps_per_epoch: Batches of this worker's epoch.
        num_workers: Workers that train at the same time.

    >>> [auto_window(1000, p) for p in (1, 2, 4, 8, 64)]
    [16, 16, 8, 4, 1]
    """
    return max(1, min(MAX_STACK, steps_per_epoch // 16, MOST_STALE // num_workers))


class _Loop(Generic[L]):
    """One run of the loop.

    A window (the batches between two exchanges) is trained in one or several stacks of batches;
    a stack is one compiled call. Where the synchronizer can exchange within a stack, a stack holds
    as many windows as fit.
    """

    def __init__(
        self,
        learner: L,
        synchronizer: Synchronizer[L],
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
            window = auto_window(batches.steps_per_epoch, settings.at_once or num_workers)
        longest = _longest_stack(batches)
        if synchronizer.every_batch:
            window = longest
        self.stacks_per_window = -(-window // longest)
        self.stack_batches = -(-window // self.stacks_per_window)
        self.window = 0  # within a stack
        fits = window <= longest and settings.window != EPOCH_WINDOW
        if fits and synchronizer.cuts_stacks and not self._follows_schedule:
            self.window, self.stack_batches = window, longest // window * window
        self.clock = current_clock()
        self.steps = 0
        self.own_steps = self.counted_step = 0
        self.rate: float | None = None
        self.next_report = 0.0
        self.next_keep = time.monotonic() + _KEEP_S
        self.first_report = True
        self.last_report: Report | None = None

    @property
    def windows_per_epoch(self) -> int:
        """Exchanges in one epoch of this worker; the smaller last batch is a stack of its own."""
        full, total = self.batches.full_batches, self.batches.steps_per_epoch
        if self.synchronizer.every_batch:
            return total
        stacks = -(-full // (self.window or self.stack_batches)) + (total - full)
        if self.settings.window == EPOCH_WINDOW:
            return min(1, stacks)
        return -(-stacks // self.stacks_per_window)

    def run(self, start: Start) -> None:
        """Trains the epochs from ``start`` on."""
        self.first_step = self.learner.optimizer.step
        self._go_on(start)
        self.learning_rate = self.learner.optimizer.learning_rate
        self._follow_driver()  # a rank that joins late begins at the rate of the others
        position = start.position
        for epoch in range(max(start.epoch, self.settings.first_epoch), self.settings.epochs):
            if self.synchronizer.orders.stopped:
                return
            self.learner.metrics.reset()
            self.first_report = True
            if not self._train_epoch(epoch, position, start.windows_per_epoch):
                return
            position = 0
            held_out = None
            if self.validation is not None:
                stacks = self.validation.stacks(0, _longest_stack(self.validation))
                # Where the driver looks at the weights, they are those that were evaluated.
                last = epoch + 1 == self.settings.epochs or self.settings.wait_for_driver
                with (
                    self.clock.within("evaluate"),
                    self.synchronizer.weights_of_run(self.learner, last),
                ):
                    held_out = self.learner.evaluate(stacks)
            # Those that train in step keep it together, which no rank's clock may decide.
            due = start.windows_per_epoch is None and time.monotonic() >= self.next_keep
            if self.settings.keep_state or due:
                self.next_keep = time.monotonic() + _KEEP_S
                self.synchronizer.keep_state(self.learner, epoch + 1)
            self.synchronizer.end_epoch(
                self.learner, epoch, self.learner.metrics.state(), held_out,
                self.settings.wait_for_driver,
            )  # fmt: skip
            self._follow_driver()

    def _train_epoch(self, epoch: int, position: int, windows_of_all: int | None) -> bool:
        """Trains one epoch; False if the driver stopped it.

        Args:
            position: See :class:`sparkdl.training.syncing.Start`.
            windows_of_all: Windows that all workers take together. A worker with fewer takes part
                in the others without batches. None: each worker takes its own windows only.
        """
        total = self.batches.steps_per_epoch
        windows_done = position
        every_batch = self.synchronizer.every_batch
        batches_done = self._batches_of(position, windows_of_all)
        stacks = batches = rows = 0
        whole_epoch = self.settings.window == EPOCH_WINDOW and not every_batch
        source = self.clock.each(self.batches.stacks(epoch, self.stack_batches, batches_done))
        first_batch = batches_done
        self.learner.draws.mark(self.settings.seed, epoch, first_batch)
        with closing(source):
            for stack in source:
                stacks += 1
                batches += stack.num_batches
                rows += stack.num_rows
                batches_done += stack.num_batches
                self.steps += stack.num_batches
                window_full = stacks == self.stacks_per_window and not whole_epoch
                exchange = batches_done == total or window_full
                windows_done += self._windows_of(stack) if exchange or every_batch else 0
                report = self._report(epoch, batches_done, windows_done, batches, rows)
                with self.explained():
                    if exchange:
                        self.synchronizer.train(self.learner, stack, report)
                        stacks = batches = rows = 0
                    else:
                        self.synchronizer.train_on(self.learner, stack, report)
                self.clock.enter("compute")  # the first call was compiled: part of the start
                self._follow_schedule(stack.num_batches)
                self._follow_driver()
                if self.synchronizer.orders.stopped:
                    return False
        while windows_of_all is not None and windows_done < windows_of_all:
            windows_done += 1
            report = self._report(epoch, batches_done, windows_done, 0, 0)
            with self.explained():
                self.synchronizer.train(self.learner, None, report)
            self._follow_driver()
            if self.synchronizer.orders.stopped:
                return False
        if windows_of_all is not None and every_batch:
            self.learner.draws.fill(batches_done - first_batch, windows_of_all - first_batch)
        return True

    def _batches_of(self, position: int, windows_of_all: int | None) -> int:
        """This worker's batches of an epoch up to ``position``; see :meth:`_train_epoch`."""
        if windows_of_all is not None and not self.synchronizer.every_batch:
            position *= self.stacks_per_window * self.stack_batches
        return min(position, self.batches.steps_per_epoch)

    def _windows_of(self, stack: BatchStack) -> int:
        """Exchanges that are due when ``stack`` is trained, after which one is due."""
        if self.synchronizer.every_batch:
            return stack.num_batches
        return -(-stack.num_batches // self.window) if self.window else 1

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Says of an update that is not finite which batch made it, and why."""
        try:
            yield
        except NotFiniteError as error:
            assert self.last_report is not None
            found = self._not_finite(self.last_report, error.among)
            own = isinstance(found, DataError) or not error.joined
            raise found from (None if own else error)

    def _not_finite(self, report: Report, among: tuple[int, int] | None) -> SparkDLError:
        """Finds out whether a batch of the window has NaN or infinity, or the step made it."""
        last = report.batches_done
        first = last - report.batches
        if among is not None:
            first, last = max(0, first + among[0]), first + among[1]
        epoch = f"epoch {report.epoch + 1} of {self.settings.epochs}"
        hint = "on_nan='skip' refuses such updates, on_nan='ignore' sends them"
        with closing(self.batches.stacks(report.epoch, 1, first)) as source:
            for number, stack in zip(range(first, last), source, strict=False):
                groups = {"input": stack.x, "label": stack.y, "weight": stack.sample_weight or {}}
                for kind, arrays in groups.items():
                    for name, array in arrays.items():
                        if not is_finite(array):
                            return DataError(
                                f"{epoch}, batch {number + 1}: the data hold a number that is not "
                                f"finite, in {kind} {name!r}",
                                expected="finite numbers",
                                received="NaN or infinity",
                                hint=f"check_data=True names the row before training; {hint}",
                            )
        where = f"batch {last}" if last - first == 1 else f"batches {first + 1} to {last}"
        return ModelError(
            f"{epoch}, {where}: the training step made NaN or infinity of finite data",
            expected="finite weights and gradients", received="NaN or infinity",
            hint=f"a lower learning rate, or an optimizer with clipnorm=1.0; {hint}",
        )  # fmt: skip

    def _report(
        self, epoch: int, batches_done: int, windows_done: int, batches: int, rows: int
    ) -> Report:
        if self.learner.optimizer.has_schedule:
            self.learning_rate = self.learner.optimizer.learning_rate
        self.last_report = Report(
            epoch=epoch, batches_done=batches_done, windows_done=windows_done, batches=batches,
            rows=rows, learning_rate=self.learning_rate, metrics=self._live_metrics(),
            window=self.window,
        )  # fmt: skip
        return self.last_report

    def _go_on(self, start: Start) -> None:
        """Tells a learning-rate schedule the steps that earlier attempts have taken."""
        per_epoch = self.batches.steps_per_epoch
        position = self._batches_of(start.position, start.windows_per_epoch)
        if start.windows_per_epoch is not None and self.synchronizer.every_batch:
            per_epoch, position = start.windows_per_epoch, start.position  # a step of all workers
        self.steps = max(0, start.epoch - self.settings.first_epoch) * per_epoch + position
        if self.steps and not start.with_optimizer:
            together = self.num_workers if self.settings.follow_schedule else 1
            self.learner.optimizer.set_step(self.first_step + self.steps * together)
            self.learner.draws.skip(self.steps)
        self.own_steps = self.steps
        self.counted_step = self.learner.optimizer.step

    @property
    def _follows_schedule(self) -> bool:
        return self.settings.follow_schedule and self.learner.optimizer.has_schedule

    def _follow_schedule(self, batches: int) -> None:
        """Tells a learning-rate schedule the steps of all workers, as if all were equally fast.

        Args:
            batches: Batches since the last call. One whose scaled loss overflows is no step.
        """
        if self._follows_schedule:
            if self.learner.optimizer.scales_loss:
                batches = self.learner.optimizer.step - self.counted_step
            self.own_steps += batches
            self.counted_step = self.first_step + self.own_steps * self.num_workers
            self.learner.optimizer.set_step(self.counted_step)

    def _live_metrics(self) -> MetricState | None:
        """The metrics for a live report, if one is due."""
        now = time.monotonic()
        if now < self.next_report or self.first_report:  # which has the metrics of no batch yet
            self.first_report = False
            return None
        self.next_report = now + self.settings.report_interval_s
        return self.learner.metrics.state()

    def _follow_driver(self) -> None:
        """Sets what the driver's callbacks wrote: variables, and the learning rate, once each."""
        self.synchronizer.take_changes(self.learner)
        rate = self.synchronizer.orders.learning_rate
        if rate is not None and rate != self.rate:
            self.learner.optimizer.set_learning_rate(rate)
            self.rate = self.learning_rate = rate


def _longest_stack(batches: BatchSource) -> int:
    """Batches in one stack: a power of two, so that it divides :data:`MAX_STACK`."""
    if not batches.stackable:
        return 1
    fitting = STACK_BYTES // max(1, batches.batch_bytes)
    return min(MAX_STACK, 1 << max(0, fitting.bit_length() - 1))
