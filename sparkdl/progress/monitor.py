"""What the user sees while a fit runs: progress bar, callbacks, History; on the driver."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkdl.learner import metric_state
from sparkdl.progress.run_progress import EpochProgress, RunProgress


class FitMonitor:
    """Turns the workers' progress into Keras' events, in the driver's thread.

    Callbacks see one event per epoch with the metrics of all workers together, and batch events
    whenever news arrive (several times a second, not once per batch).

    Args:
        model: The driver's model; callbacks may change its learning rate or stop it.
        callbacks: The user's, or None.
        epochs: Epoch to stop at.
        first_epoch: Epoch to begin with.
        verbose: 0 silent, 1 progress bar, 2 a line per epoch.
    """

    def __init__(
        self,
        model: Any,
        callbacks: Any,
        *,
        epochs: int,
        first_epoch: int,
        verbose: int,
    ) -> None:
        import keras

        self._model, self._verbose = model, verbose
        self._epochs, self._epoch = epochs, first_epoch
        self._bring_weights: Callable[[], None] = lambda: None
        self.has_callbacks = bool(callbacks)
        self.callbacks = keras.callbacks.CallbackList(
            callbacks, add_history=True, add_progbar=False, model=model,
            verbose=verbose, epochs=epochs, steps=None,
        )  # fmt: skip
        self._bar: _Bar | None = None
        self._speed = _Speed()
        self._started = self._begun = False
        self._batch = 0
        self._learning_rate: float | None = None
        self._stopped = False
        self.stopped_inside = False
        """Whether a callback stopped the training in the middle of an epoch."""

    # -- events --------------------------------------------------------------------------------

    def watch(self, bring_weights: Callable[[], None]) -> None:
        """From now on ``bring_weights`` brings the workers' present weights into the model."""
        self._bring_weights = bring_weights

    @property
    def stopped(self) -> bool:
        """Whether a callback has stopped the training."""
        return self._stopped

    def begin(self) -> None:
        """Tells the callbacks that training begins, and that its first epoch does; once."""
        if self._started:
            return
        self._started = True
        self._model.stop_training = False
        self._learning_rate = self._read_rate()
        self.callbacks.on_train_begin()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        if self._epoch >= self._epochs or self._begun:
            return
        self._begun, self._batch = True, 0
        self.callbacks.on_epoch_begin(self._epoch)
        if self._verbose:
            self._bar = _Bar(self._epoch, self._epochs, self._verbose)

    def update(self, progress: RunProgress) -> list[dict[str, Any]]:
        """Takes in what the workers say now; returns commands for them (``stop`` and so on)."""
        if self._stopped:  # what the workers still did is no part of the History
            return []
        commands: list[dict[str, Any]] = self._rate_commands()
        self._speed.update(progress.rows)
        while self._epoch < self._epochs:
            epoch = progress.epochs.get(self._epoch)
            if epoch is None:
                if self._bar is not None:
                    self._bar.wait(progress.joined)
                break
            if epoch.missing:
                self._show(epoch, progress)
                if self._model.stop_training:  # a callback did, in the middle of the epoch
                    self.stopped_inside = True
                    commands += self._end_epoch(epoch, progress)
                break
            commands += self._end_epoch(epoch, progress)
            if self._model.stop_training:
                break
        return commands

    def _show(self, epoch: EpochProgress, progress: RunProgress) -> None:
        if self._bar is None and not self.has_callbacks:
            return
        if epoch.batches <= self._batch or not epoch.metrics.size:
            if self._bar is not None and not self._batch:
                self._bar.wait(progress.joined)
            return
        self._batch = epoch.batches
        logs = self._logs(epoch.metrics)
        if self.has_callbacks:
            self.callbacks.on_train_batch_begin(self._batch - 1)
            self.callbacks.on_train_batch_end(self._batch - 1, logs)
        if self._bar is not None:
            self._bar.show(
                epoch.batches, progress.batches_per_epoch, logs,
                self._speed.rate, progress.staleness,
            )  # fmt: skip

    def _end_epoch(self, epoch: EpochProgress, progress: RunProgress) -> list[dict[str, Any]]:
        logs = self._logs(epoch.metrics)
        if epoch.val_metrics.size:
            logs |= {f"val_{k}": v for k, v in self._logs(epoch.val_metrics).items()}
        if self.has_callbacks and not self.stopped_inside:
            self._bring_weights()
        number = self._epoch
        if self._bar is not None:
            self._bar.end(progress.batches_per_epoch, logs, self._speed.rate, progress.staleness)
        self.callbacks.on_epoch_end(number, logs)
        if not self.stopped_inside:
            self._epoch += 1
        self._begun = False
        if self._model.stop_training:
            self._stopped = True
            return [{"stop": True, "release": number}]
        self._begin_epoch()
        return [*self._rate_commands(), {"release": number}]

    def end(self) -> Any:
        """Tells the callbacks that training ended; returns the History."""
        self.callbacks.on_train_end()
        return self._model.history

    @property
    def epochs_done(self) -> int:
        """Epochs that ended, counted from 0."""
        return self._epoch

    # -- learning rate -------------------------------------------------------------------------

    def _read_rate(self) -> float | None:
        import keras

        optimizer = self._model.optimizer
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is None or isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
        return float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    def _rate_commands(self) -> list[dict[str, Any]]:
        """A command if a callback has changed the learning rate."""
        rate = self._read_rate()
        if rate is None or rate == self._learning_rate:
            return []
        self._learning_rate = rate
        return [{"learning_rate": rate}]

    def _logs(self, state: Any) -> dict[str, Any]:
        return metric_state.metric_results(self._model, np.asarray(state, np.float64))


class _Speed:
    """Rows per second of all workers together, over the last seconds."""

    def __init__(self, window_s: float = 3.0) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, rows: int) -> None:
        now = time.monotonic()
        if not self._seen or rows != self._seen[-1][1]:
            self._seen.append((now, rows))
            while len(self._seen) > 2 and now - self._seen[0][0] > self._window_s:
                self._seen.popleft()

    @property
    def rate(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        return (after - before) / max(end - start, 1e-9)


class _Bar:
    """One line per epoch: steps, metrics, rows per second of all workers, and staleness.

    Keras' Progbar shows seconds per step and the time left from when it was made; here several
    epochs may end between two looks, so those figures would mislead.
    """

    _WIDTH = 24

    def __init__(self, epoch: int, epochs: int, verbose: int) -> None:
        self._verbose, self._length = verbose, 0
        self._live = verbose == 1 and (sys.stdout.isatty() or "ipykernel" in sys.modules)
        self._title = f"Epoch {epoch + 1}/{epochs}"
        if self._live:
            print(self._title, flush=True)

    def wait(self, joined: int) -> None:
        """Before the first step: how many workers are there."""
        if self._live:
            self._write(f"\r{joined or 'no'} worker{'s' * (joined != 1)} yet", "")

    def show(
        self, batches: int, target: int, logs: dict[str, Any], rate: float, staleness: float
    ) -> None:
        if self._live:
            line = self._line(min(batches, target), target, logs, rate, staleness)
            self._write(f"\r{line}", "")

    def end(self, target: int, logs: dict[str, Any], rate: float, staleness: float) -> None:
        line = self._line(target, target, logs, rate, staleness)
        self._write(f"\r{line}" if self._live else f"{self._title} {line}", "\n")

    def _line(
        self, batches: int, target: int, logs: dict[str, Any], rate: float, staleness: float
    ) -> str:
        parts = [f"{k}: {v:.4f}" for k, v in logs.items() if isinstance(v, float)]
        if rate:
            parts.append(f"{rate:,.0f} rows/s")
        if staleness:
            parts.append(f"staleness {staleness:.1f}")
        text = " - ".join(parts)
        if self._verbose == 2:
            return f"- {text}"
        filled = self._WIDTH * batches // target if target else self._WIDTH
        bar = "━" * filled + "─" * (self._WIDTH - filled)
        return f"{batches:>{len(str(target))}}/{target} {bar} {text}"

    def _write(self, line: str, end: str) -> None:
        padding = " " * max(0, self._length - len(line))  # a shorter line hides the one before
        self._length = 0 if end else len(line)
        print(line + padding, end=end, flush=True)
