"""``FitMonitor``: makes events of what the workers report, and commands of what is decided then."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from sparkdl.errors import DataError
from sparkdl.process.host_load import HostLoad, LoadMeter
from sparkdl.process.user_warnings import warn_user
from sparkdl.progress import events
from sparkdl.progress.events import EpochProgress, RunProgress
from sparkdl.training.changes import VariableChanges
from sparkdl.training.phases import Spans
from sparkdl.training.reports import MetricState


@dataclass(frozen=True)
class Command:
    """All parts of it take effect together; workers that train in step see it at one step.

    Args:
        stop: All workers stop after the step that they are at.
        learning_rate: The rate to train on with; None: no change.
        release: Workers that wait for the driver at the end of this epoch go on; None: nobody.
        changes: What callbacks wrote to variables of the model; None: nothing.
    """

    stop: bool = False
    learning_rate: float | None = None
    release: int | None = None
    changes: VariableChanges | None = None


class RecentSpeed:
    """Rows per second over the last seconds."""

    def __init__(self, span_s: float = 3.0) -> None:
        self._span_s = span_s
        self._looks: deque[tuple[float, int]] = deque()

    def look(self, now: float, rows: int) -> None:
        """Takes in the rows that all workers have trained until ``now`` (in seconds)."""
        before = self._looks[-1][1] if self._looks else 0
        if rows < before or not before:  # the stage began again; time without rows does not count
            self._looks.clear()
        self._looks.append((now, rows))
        while len(self._looks) > 2 and now - self._looks[1][0] >= self._span_s:
            self._looks.popleft()

    @property
    def rows_per_s(self) -> float | None:
        """None before the second look that saw rows."""
        if len(self._looks) < 2:
            return None
        (start, before), (end, after) = self._looks[0], self._looks[-1]
        return (after - before) / (end - start) if end > start and after > before else None


class EpochSpeed:
    """Rows per second of epochs: their rows over the time from the end of the epoch before.

    The first epoch counts from the first look that saw rows of it: starting workers and compiling
    the model take seconds in which nothing is trained. Where more than half of that epoch was
    over by then, it counts from the look before. Epochs that end between two looks share the time
    between the two.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._before: float | None = None
        self._rows_before = 0

    def look(self, now: float, rows: int, *, workers: int) -> None:
        """Takes in what is done of the present epoch."""
        if self._since is None and rows:
            self._since, self._rows_before = now, rows
        elif self._since is None and workers:
            self._before = now

    def end(self, now: float, rows: int) -> float | None:
        """The speed of one epoch or of several that have ended since the last look.

        Returns:
            None if nobody saw them begin.
        """
        since, trained = self._since, rows - self._rows_before
        if self._before is not None and (since is None or 2 * self._rows_before > rows):
            since, trained = self._before, rows
        self._since, self._before, self._rows_before = now, None, 0
        return None if since is None or now <= since or trained <= 0 else trained / (now - since)


WORKERS_INTERVAL_S = 0.5
"""Least time between two events that tell of each worker."""


class Steering(events.Sink, Protocol):
    """A sink that also decides how the training goes on: the user's Keras callbacks.

    What it says is read after each event that it has handled.
    """

    @property
    def has_callbacks(self) -> bool:
        """Whether the user gave callbacks: they want the trained weights at an epoch's end."""

    @property
    def stop_wanted(self) -> bool:
        """Whether the training is to stop."""

    @property
    def learning_rate(self) -> float | None:
        """The rate to train with; None where a schedule says it."""

    def model_sent(self) -> None:
        """The workers were sent the model as it is now."""

    def loading(self) -> AbstractContextManager[None]:
        """Within, the workers' weights are loaded into the model."""

    def take_changes(self) -> VariableChanges:
        """The values that it wrote to variables of the model since the last call."""

    def write_again(self) -> None:
        """Writes that once more, after the weights that it wrote to were loaded again."""


class FitMonitor:
    """Turns what the workers report into events for the sinks, in the driver's thread.

    Sinks see one ``EpochEnded`` per epoch with the metrics of all workers together, and
    ``EpochProgressed`` whenever there is something new: several times a second, not per batch.

    Args:
        metric_values: From a metric state (summed over workers) to the metrics' values.
        validates: Whether there are to be rows to validate on: ``'must'`` (validation_data),
            ``'split'`` (validation_split), or ``'may'`` where a column chooses them; None without.

    Raises:
        DataError: From :meth:`update`: no worker has a row to validate on, and there must be one.
    """

    def __init__(
        self,
        steering: Steering,
        sinks: Iterable[events.Sink],
        metric_values: Callable[[MetricState], events.Metrics],
        *,
        epochs: int,
        first_epoch: int,
        run: events.RunDescription | None = None,
        validates: Literal["must", "split", "may"] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = events.RunDescription() if run is None else run
        self._validates = validates
        self._steering = steering
        self._sinks: tuple[events.Sink, ...] = (*sinks, steering)
        self._metric_values = metric_values
        self._validated = self._fills_gaps = False
        self._epochs, self._first_epoch = epochs, first_epoch
        self.epochs_done = first_epoch
        """Epochs that have ended, counted from 0."""
        self._clock = clock
        self._recent, self._epoch_speed = RecentSpeed(), EpochSpeed()
        self._load_weights: Callable[[], None] = lambda: None
        self.loads = self.has_callbacks
        """Whether the model has the weights of each epoch's end."""
        self._training = self._in_epoch = self.stopped = self.stopped_inside = False
        self._ending = False
        self._batches = self._workers = 0
        self._awaited: tuple[int, ...] = ()
        self._learning_rate: float | None = None
        self.rate_between_epochs: float | None = None
        """The learning rate after the last epoch's end, before the next one began: a checkpoint has
        this one, for its resume begins that next epoch again. None where a schedule says the rate,
        and before an epoch has ended."""
        self._workers_due = self._lines_due = 0.0
        self._meter = LoadMeter(gpus=False)
        self._driver_load: HostLoad | None = None
        self._losses: list[float] = []

    @property
    def has_callbacks(self) -> bool:
        return self._steering.has_callbacks

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean loss of each whole epoch that has ended, where the model has one."""
        return tuple(self._losses)

    def watch(self, load_weights: Callable[[], None], *, waits: bool = False) -> None:
        """From now on ``load_weights`` loads the workers' present weights into the model.

        Args:
            load_weights: Called at an epoch's end, before the workers hear of what comes next.
            waits: Whether they wait for that, so that it is called without callbacks, too.
        """
        self._load_weights, self.loads = load_weights, waits or self.has_callbacks
        self._steering.model_sent()

    def loaded_again(self, epoch: int) -> None:
        """The model was set to the workers' weights after ``epoch`` epochs, once more.

        What callbacks wrote to them at that epoch's end is written again.
        """
        if epoch == self.epochs_done:
            self._steering.write_again()

    def begin(self) -> None:
        """Says that training begins, and that its first epoch does; later calls do nothing.

        To be called before the model is sent to the workers: callbacks set the first epoch's rate.
        """
        if self._training:
            return
        self._training = True
        self._learning_rate = self._steering.learning_rate
        self._tell(events.TrainingBegan(self._first_epoch, self._epochs, self._run))
        self._begin_epoch()

    def update(self, progress: RunProgress) -> Command | None:
        """Takes in what the workers report now; returns what to tell them, if there is anything."""
        if self.stopped:  # what the workers still did is no part of the History
            return None
        now = self._clock()
        self._recent.look(now, progress.rows)
        goes_on = self.epochs_done < self._epochs
        if progress.joined != self._workers and not self._batches and goes_on:
            self._workers = progress.joined
            self._tell(events.WorkersJoined(self.epochs_done, progress.joined))
        if progress.awaited != self._awaited and goes_on:
            self._awaited = progress.awaited
            self._tell(events.WorkersAwaited(self.epochs_done, progress.awaited))
        if now >= self._workers_due and progress.workers and self._wants_progress:
            self._workers_due = now + WORKERS_INTERVAL_S
            self._tell_workers(progress)
        released: int | None = None
        ended = self._ended(progress)
        speed = self._epoch_speed.end(now, sum(e.rows for e in ended)) if ended else None
        for epoch in ended:
            released = self.epochs_done
            self._end_epoch(epoch, progress, speed)
            if self.stopped:
                break
        present = progress.epochs.get(self.epochs_done)
        if not self.stopped and self.epochs_done < self._epochs:
            self._show(now, present, progress)
            if present is not None and self._steering.stop_wanted:
                self.stopped_inside = True
                released = self.epochs_done
                self._end_epoch(present, progress, self._recent.rows_per_s)
        return self._command(released)

    def lines_due(self, *, last: bool = False) -> bool:
        """Whether :meth:`hear` is to be called: about twice a second, where a sink wants it."""
        now = self._clock()
        if not self._wants_progress or (now < self._lines_due and not last):
            return False
        self._lines_due = now + WORKERS_INTERVAL_S
        return True

    def hear(self, lines: Iterable[tuple[int, str]]) -> None:
        """Takes in ``(rank, line)`` of what the ranks have said."""
        if told := tuple(lines):
            self._tell(events.LinesLogged(told))

    def end_epochs(self, progress: RunProgress, epochs: int) -> None:
        """Ends the first ``epochs`` epochs with what was reported of them.

        For a stage that was lost when its workers had trained an epoch, and before all of them had
        reported it: the stage that follows does not train that epoch, so nobody else would end it.
        """
        ended = {
            number: replace(progress.epochs.get(number, EpochProgress()), missing=0)
            for number in range(self.epochs_done, epochs)
        }
        validates, self._validates = self._validates, None  # they may lack those rows' metrics
        self._fills_gaps = self._validated or validates in ("must", "split")
        self.update(replace(progress, epochs=ended))
        self._fills_gaps, self._validates = False, validates

    def end_finished(self, progress: RunProgress) -> None:
        """Ends the epochs that the workers had finished when the user ended the fit.

        Nothing where the end of an epoch was being told just then: no event comes twice.
        """
        if not self._ending:
            self.update(progress)

    def end_workers(self, progress: RunProgress, spans: Mapping[int, Spans]) -> None:
        """Says what the workers have done in all, and when, after the last has ended."""
        if progress.workers and self._wants_progress:
            self._tell_workers(progress)
        for rank, traced in sorted(spans.items()):
            self._tell(events.WorkerTraced(rank, traced))

    def end(self) -> None:
        """Says that training ended well."""
        self._tell(events.TrainingEnded(self.epochs_done, self.stopped))

    def fail(self, error: BaseException) -> None:
        """Says that training ended with ``error``; nothing if it has not begun."""
        if self._training:
            first_line = str(error).partition("\n")[0]
            name = type(error).__name__
            self._tell(events.TrainingFailed(f"{name}: {first_line}" if first_line else name))

    def _tell(self, event: events.Event) -> None:
        for sink in self._sinks:
            sink.handle(event)

    @property
    def _wants_progress(self) -> bool:
        return any(sink.wants_progress for sink in self._sinks)

    def _tell_workers(self, progress: RunProgress) -> None:
        self._driver_load = self._meter.look() or self._driver_load
        self._tell(events.WorkersProgressed(
            progress.workers, progress.bytes_in, progress.bytes_out, self._driver_load,
            progress.servers, socket.gethostname(),
        ))  # fmt: skip

    def _begin_epoch(self) -> None:
        if self.epochs_done < self._epochs and not self._in_epoch:
            self._in_epoch, self._batches = True, 0
            self._tell(events.EpochBegan(self.epochs_done))

    def _ended(self, progress: RunProgress) -> list[EpochProgress]:
        found: list[EpochProgress] = []
        for number in range(self.epochs_done, self._epochs):
            epoch = progress.epochs.get(number)
            if epoch is None or epoch.missing:
                break
            found.append(epoch)
        return found

    def _show(self, now: float, epoch: EpochProgress | None, progress: RunProgress) -> None:
        rows = 0 if epoch is None else epoch.rows
        self._epoch_speed.look(now, rows, workers=progress.joined)
        if epoch is None or epoch.batches <= self._batches or not epoch.metrics.size:
            return
        self._batches = epoch.batches
        if self._wants_progress:
            metrics, target = self._metric_values(epoch.metrics), progress.batches_per_epoch
            done, speed = min(epoch.batches, target), self._recent.rows_per_s
            event = events.EpochProgressed(
                self.epochs_done, done, target, metrics, speed, progress.staleness
            )
            self._tell(event)

    def _end_epoch(self, epoch: EpochProgress, progress: RunProgress, speed: float | None) -> None:
        self._ending = True
        if self._validates and epoch.metrics.size and not self.stopped_inside:
            self._look_for_validation(epoch)
        metrics = self._values(epoch.metrics)
        if epoch.val_metrics.size or self._fills_gaps:
            self._validated |= epoch.val_metrics.size > 0
            held_out = self._values(epoch.val_metrics)
            metrics |= {f"val_{name}": value for name, value in held_out.items()}
        if self.loads and not self.stopped_inside:
            with self._steering.loading():
                self._load_weights()
        if epoch.seconds:
            speed = epoch.rows / epoch.seconds
        target = progress.batches_per_epoch
        batches = min(epoch.batches, target) if self.stopped_inside else target
        ended = events.EpochEnded(
            self.epochs_done, batches, target, epoch.rows, metrics, speed, progress.staleness
        )
        self._tell(ended)
        self._in_epoch = False
        self.rate_between_epochs = self._steering.learning_rate
        if not self.stopped_inside:
            self.epochs_done += 1
            if isinstance(loss := metrics.get("loss"), float):
                self._losses.append(loss)
        if self._steering.stop_wanted:
            self.stopped = True
        else:
            self._begin_epoch()
        self._ending = False

    def _values(self, state: MetricState) -> dict[str, events.MetricValue]:
        """Name -> value of a metric; NaN where no row was counted, as all were refused or a lost
        stage did not report: 0 would be the best loss of all."""
        values = dict(self._metric_values(state))
        return values if state.any() else {name: _no_value(v) for name, v in values.items()}

    def _look_for_validation(self, epoch: EpochProgress) -> None:
        """Callbacks such as early stopping would wait in vain for metrics that never come."""
        chosen, self._validates = self._validates, None  # one look is enough
        if epoch.val_metrics.size:
            return
        if chosen == "may":
            warn_user(
                "no row was chosen to validate on: the column that validation_data names is true "
                "in none, so there are no val_ metrics"
            )
            return
        place, hint = "of the share validation_split", "few rows want a larger validation_split"
        if chosen == "must":
            place = "in validation_data"
            hint = (
                "a filter or a split may have left none: validation_data.count() tells; "
                "validation_data=None trains without validation"
            )
        raise DataError(
            "there are no rows to validate on", expected=f"at least one row {place}",
            received="0 rows on all workers", hint=hint,
        )  # fmt: skip

    def _command(self, released: int | None) -> Command | None:
        """The command to be given, if any: a new rate, a stop, who may go on, what was written."""
        rate = self._steering.learning_rate
        changed = rate is not None and rate != self._learning_rate
        # Where the training stops, what callbacks write (the best weights) is for the driver alone.
        written = None if self.stopped else self._steering.take_changes() or None
        if not (changed or self.stopped or released is not None or written is not None):
            return None
        if changed:
            self._learning_rate = rate
        return Command(self.stopped, rate if changed else None, released, written)


def _no_value(value: events.MetricValue) -> events.MetricValue:
    return [_no_value(v) for v in value] if isinstance(value, list) else float("nan")
