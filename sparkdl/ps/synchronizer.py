"""How a worker keeps in step with a parameter server: by windows, or by gradients.

NumPy and protocols only: the learner and the client come by argument, so the same code runs
against a server process, shared memory, or a scripted client in a test.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Protocol

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.finite import FiniteCheck, finite_state
from sparkdl.phases import current_clock
from sparkdl.protocols import BatchStack, Learner
from sparkdl.ps.client import Progress
from sparkdl.ps.rules.rule import Rule
from sparkdl.run_state import RunState
from sparkdl.weights import FloatArray, Layout

OVERLAP_FROM = 0.25
"""Part of a worker's time that its exchanges take from which on they run beside the training."""
_UNTIMED = 2
"""First windows that are not timed: they compile."""


class StoreAccess(Protocol):
    """The part of :class:`sparkdl.ps.client.Client` that synchronizers use."""

    upload_requested: bool
    round_rows: int

    @property
    def lead(self) -> bool: ...

    @property
    def in_step(self) -> bool: ...

    @property
    def source(self) -> str: ...

    @property
    def buffer(self) -> FloatArray: ...

    def pull(self) -> FloatArray: ...

    def push(self, progress: Progress) -> None: ...

    def push_pull(self, progress: Progress) -> FloatArray: ...

    def snapshot(self, epoch: int, batch: int = 0) -> None: ...

    def put_state(self, state: bytes, epoch: int, batch: int) -> None: ...

    def get_state(self) -> bytes: ...


class _Peer:
    """A client as a rule's worker half sees it, with the commit's progress filled in."""

    def __init__(self, client: StoreAccess, progress: Progress) -> None:
        self._client = client
        self._progress = progress

    @property
    def buffer(self) -> FloatArray:
        return self._client.buffer

    def push(self) -> None:
        self._client.push(self._progress)

    def pull(self) -> None:
        self._client.pull()

    def push_pull(self) -> None:
        self._client.push_pull(self._progress)


class WindowSynchronizer:
    """Exchanges weights with the server after each window, by the rule's worker half.

    With ``overlap`` the exchange of one window runs in a thread while the next is trained; then
    ``local = center + (local_now - local_at_push)``: the worker's own progress since the push is
    kept on top of the center. Only for rules whose exchange is the base class's. A delta then
    counts one window later, so it is done only where it pays: on a slow network.

    Args:
        rule: Its ``exchange`` is called.
        client: Connected; has said HELLO.
        layout: Of the flat buffer.
        overlap: Whether to exchange while training; None measures, and begins with it when
            exchanges take more than :data:`OVERLAP_FROM` of the time and the rule allows it.
        check: Looks at the weights before they are sent; None: nobody does.

    Raises:
        ConfigError: ``overlap`` with a rule that has an exchange of its own, or blocks.
    """

    def __init__(
        self,
        rule: Rule,
        client: StoreAccess,
        layout: Layout,
        *,
        overlap: bool | None = None,
        check: FiniteCheck | None = None,
    ) -> None:
        can_overlap = type(rule).exchange is Rule.exchange and not rule.blocking
        if overlap and not can_overlap:
            raise ConfigError(
                f"rule {rule.name!r} cannot overlap its exchange with training",
                expected="a non-blocking rule with the plain delta exchange",
                received="overlap=True",
                hint="overlap=False",
            )
        self._rule = rule
        self._client = client
        self._clock = current_clock()
        self._check = check or FiniteCheck("ignore", layout.trained_size)
        self.overlaps = bool(overlap)
        self._measures = overlap is None and can_overlap
        self._windows = 0
        self._exchange_s = self._train_s = self._ended = 0.0
        self._local = np.zeros(layout.size, np.float32)
        self._base = np.zeros(layout.size, np.float32)
        self._pushed = np.zeros(layout.size if overlap else 0, np.float32)  # or when it begins
        self._flight: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, learner: Learner) -> None:
        """Takes the center as the weights to start from."""
        center = self._client.pull()
        self._local[...] = center
        self._base[...] = center
        learner.write_weights(self._local)

    def after_window(self, learner: Learner, progress: Progress) -> None:
        """One exchange: what was trained since the last one goes out, the center comes in.

        Args:
            learner: Its weights are read, and replaced.
            progress: A :class:`sparkdl.ps.client.Progress`.
        """
        if not self.overlaps:
            began = time.perf_counter()
            learner.read_weights(self._local)
            if not self._check.admits(self._local):
                progress = self._begin_again(learner, progress)
                np.copyto(self._local, self._base)
            with self._clock.within("exchange"):
                self._rule.exchange(self._local, self._base, _Peer(self._client, progress))
                learner.write_weights(self._local)
            if self._measures:
                self._measure(began, time.perf_counter())
            return
        self._land(learner)  # the exchange of the window before
        learner.read_weights(self._pushed)
        if not self._check.admits(self._pushed):
            progress = self._begin_again(learner, progress)
            np.copyto(self._pushed, self._base)
        np.subtract(self._pushed, self._base, out=self._client.buffer)
        self._flight = threading.Thread(
            target=self._fly, args=(progress,), name="sparkdl-ps-exchange", daemon=True
        )
        self._flight.start()

    def _begin_again(self, learner: Learner, progress: Progress) -> Progress:
        """Gives the learner the center, and an optimizer and metrics without NaN.

        Returns:
            The progress of an exchange that brings nothing.
        """
        self._base[...] = self._client.pull()
        learner.write_weights(self._base)
        learner.load_optimizer_state(finite_state(learner.optimizer_state()))
        learner.reset_metrics()
        return replace(progress, rows=0)

    def drain(self, learner: Learner) -> None:
        """Ends an exchange that is under way; to be called at an epoch's end, and at the end."""
        self._land(learner)

    def _measure(self, began: float, ended: float) -> None:
        """Notes the last window's times; older ones count less and less."""
        if self._windows >= _UNTIMED:
            self._train_s = 0.7 * self._train_s + began - self._ended
            self._exchange_s = 0.7 * self._exchange_s + ended - began
        self._windows, self._ended = self._windows + 1, ended
        share = self._exchange_s / max(self._exchange_s + self._train_s, 1e-9)
        if self._windows >= _UNTIMED + 4 and share > OVERLAP_FROM:
            self.overlaps, self._measures = True, False
            self._pushed = np.zeros_like(self._local)

    def _fly(self, progress: Progress) -> None:
        try:
            self._client.push_pull(progress)
        except BaseException as error:  # raised again in the training thread
            self._error = error

    def _land(self, learner: Learner) -> None:
        if self._flight is None:
            return
        with self._clock.within("exchange"):
            self._flight.join()
        self._flight = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        learner.read_weights(self._local)
        self._local -= self._pushed
        self._base[...] = self._client.buffer
        self._local += self._base
        learner.write_weights(self._local)


class ServerGradientSynchronizer:
    """Each step: gradients out, and what the server makes of them in.

    With a blocking rule that is the row-weighted mean of all ranks, for one optimizer step: the
    weights live on the workers and stay equal on all. A joiner gets weights and optimizer state
    from a live rank; if none is left, it starts from the last snapshot. With a rule that does not
    block, the server has the optimizer, and the worker trains on from the center it gets.

    Args:
        client: Connected; has said HELLO.
        layout: Of the flat buffer.
        check: Looks at the gradients before they are sent; None: nobody does.
    """

    def __init__(
        self, client: StoreAccess, layout: Layout, check: FiniteCheck | None = None
    ) -> None:
        self._client = client
        self._layout = layout
        self._check = check or FiniteCheck("ignore", layout.trained_size)
        self._statistics = np.zeros(layout.size - layout.trained_size, np.float32)

    def start(self, learner: Learner) -> None:
        """Brings ``learner`` to where the others are: the server's weights, or a live rank's."""
        if self._client.source == "state":
            RunState.from_bytes(self._client.get_state()).load_into(learner)
        else:
            learner.write_weights(self._client.pull())
        weights = np.empty(self._layout.size, np.float32)
        learner.read_weights(weights)
        self._statistics[...] = weights[self._layout.trained_size :]

    def step(self, learner: Learner, batch: BatchStack | None, progress: Progress) -> int:
        """One step of all ranks together.

        Args:
            learner: Gives gradients, takes their mean.
            batch: What ``learner.gradients`` takes; None when this rank has no more rows in this
                epoch, so that it contributes nothing (``progress.rows`` must then be 0).
            progress: A :class:`sparkdl.ps.client.Progress`; ``rows`` is the weight.

        Returns:
            Rows of all ranks in this step; of this rank, if the rule does not block.
        """
        if (batch is None) != (progress.rows == 0):
            raise ConfigError(
                "a step without rows is one without a batch",
                expected="batch=None exactly if progress.rows == 0",
                received=f"rows={progress.rows}",
            )
        refused = False
        if batch is not None:
            learner.gradients(batch, self._client.buffer)
            refused = not self._check.admits(self._client.buffer, learner)
            if refused:
                learner.reset_metrics()
                self._client.buffer[...] = 0
                batch, progress = None, replace(progress, rows=0)
                if not self._client.in_step:
                    learner.write_weights(self._client.pull())
        if not self._client.in_step:
            if batch is not None:
                learner.write_weights(self._client.push_pull(progress))
            return progress.rows
        mean = self._client.push_pull(progress)
        rows = self._client.round_rows
        if rows:
            learner.apply_gradients(mean)
            self._statistics[...] = mean[self._layout.trained_size :]
        elif refused:
            self._restore_statistics(learner)
        if self._client.upload_requested:
            state = RunState.of(learner, progress.epoch).to_bytes()
            self._client.put_state(state, progress.epoch, progress.batch)
        return rows

    def _restore_statistics(self, learner: Learner) -> None:
        """Undoes what a refused batch did to the statistics, as no other worker had rows."""
        weights = np.empty(self._layout.size, np.float32)
        learner.read_weights(weights)
        weights[self._layout.trained_size :] = self._statistics
        learner.write_weights(weights)

    def snapshot(self, learner: Learner, epoch: int, batch: int = 0) -> None:
        """Stores the weights on the server, if this rank is the lowest live one.

        To be called by all ranks at an epoch's end (``epoch`` being the next one) and at the end.
        """
        if self._client.lead and self._client.in_step:
            learner.read_weights(self._client.buffer)
            self._client.snapshot(epoch, batch)
