"""Straggler drop: a step does not wait for ranks that are much later than the others."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.collective.communicator import Communicator, name_ranks
from sparkdl.collective.rules.exchange_rule import ExchangeRule, GradientExchange, Part
from sparkdl.errors import WaitTimeoutError
from sparkdl.settings.values import (
    option,
    require_not_negative,
    require_positive,
    require_share,
    whole_from,
)
from sparkdl.weights import FloatArray, Layout

_POLL_S = 0.002


@dataclass(frozen=True)
class StragglerDrop(ExchangeRule):
    """``g = Σ n_i g_i / Σ n_i`` over the ranks that finished in time; other batches are dropped.

    On each rank a thread tells the others whether its gradient is ready, again and again, until all
    are ready, or until at least ``least`` of the ranks with rows are and rank 0 has waited
    ``patience`` times as long as these took, at least ``grace_s``. Then the step is taken with the
    gradients that are ready. A late rank discards its gradient, applies the steps that it missed,
    in order, and skips one batch for each; so all ranks stay equal to the bit.

    This helps against ranks that are slow now and then. The rows of a rank that is always slow are
    never trained on.

    Args:
        least: Share of the ranks with rows that must be ready, in (0, 1].
        patience: How much longer than these a rank may take, as a share of their time.
        grace_s: No rank is dropped sooner than this after enough others were ready.
        backlog: Steps that a late rank may miss before the others wait for it. It keeps a buffer of
            the model's size for each.
        timeout_s: Limit for one step.

    References:
        Dai et al., BigDL: a distributed deep learning framework for big data, 2019; Chen et al.,
        Revisiting distributed synchronous SGD, 2016.
    """

    least: float = option(0.5, require_share)
    patience: float = option(0.5, require_not_negative)
    grace_s: float = option(0.05, require_not_negative)
    backlog: int = option(4, whole_from(1))
    timeout_s: float = option(600.0, require_positive)

    name: ClassVar[str] = "straggler_drop"

    def open(self, communicator: Communicator, layout: Layout) -> StragglerExchange:
        return StragglerExchange(communicator, layout, self)


class StragglerExchange(GradientExchange):
    """See :class:`StragglerDrop`. Its thread uses a group of its own; steps are numbered.

    The caller's thread alone uses the learner. It writes into :attr:`buffer`, offers the gradient
    there to this exchange's thread, and waits while that reads the buffer.
    """

    def __init__(self, communicator: Communicator, layout: Layout, rule: StragglerDrop) -> None:
        super().__init__(communicator, layout)
        self.dropped = 0
        """Steps that went on without this rank's batch."""
        self._rule = rule
        self._group = communicator.group(range(communicator.size))
        self._changed = threading.Condition()
        self._begun = 0  # steps that the caller has begun
        self._decided = 0  # steps that the ranks have taken
        self._inside = False
        self._offer: tuple[int, int] | None = None  # step and rows of a gradient that is ready
        self._results: deque[FloatArray] = deque()
        self._spare: list[FloatArray] = []
        self._missing: list[int] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def reduce(self, rows: int) -> bool:
        """A step with a gradient that is computed already (see :meth:`take_step`)."""
        done = self._take(lambda: rows, rows > 0)
        if done is None:
            return False
        np.copyto(self.whole, done)
        self._spare.append(done)
        return True

    def take_step(self, parts: Sequence[Part], apply: Callable[[FloatArray], None]) -> bool:
        """As for every rule. This rank may be dropped while it computes its ``parts``.

        They are not computed if the other ranks have taken the step already.
        """
        done = self._take(lambda: self.fill(parts), bool(parts))
        if done is None:
            return False
        apply(done[:-1])
        self._spare.append(done)
        return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._group.close()
        if self._thread is not None:
            self._thread.join(10.0)

    def _take(self, fill: Callable[[], int], has_rows: bool) -> FloatArray | None:
        """One step; its result if any rank had rows."""
        with self._changed:
            self._begun += 1
            step = self._begun
            self._inside = True
            late = self._decided >= step
            if self._thread is None:
                name = f"sparkdl-straggler-{self.communicator.rank}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            rows = 0 if late else fill()
            with self._changed:
                late = self._decided >= step
                if not late:
                    self._offer = (step, rows)
                    self._changed.notify_all()
                self._wait_for(step)
                # An offer that the thread has not used was made too late for its own step.
                late, self._offer = late or self._offer is not None, None
                self.dropped += late and has_rows
                done = self._results.popleft()
                self._changed.notify_all()
        finally:
            with self._changed:
                self._inside = False
        if done[-1] > 0.0:
            return done
        self._spare.append(done)
        return None

    def _wait_for(self, step: int) -> None:
        limit = self._rule.timeout_s
        self._changed.wait_for(
            lambda: self._decided >= step or self._error is not None or self._closed, limit
        )
        if self._error is not None:
            raise self._error
        if self._decided < step:
            raise WaitTimeoutError(
                f"step {step} was not taken on rank {self.communicator.rank}; "
                f"missing {name_ranks(self._missing)}",
                expected=f"enough ranks ready within {limit:g} s",
                received="the exchange was closed" if self._closed else "no end yet",
            )

    def _serve(self) -> None:
        try:
            while self._may_begin():
                self._decide(self._decided + 1)
        except BaseException as error:
            with self._changed:
                if not self._closed:
                    self._error = error
                self._changed.notify_all()

    def _may_begin(self) -> bool:
        """Waits for the next step's turn; False once closed.

        A step begins when the caller begins it, or while the caller still computes for an earlier
        one, up to the backlog.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._begun > self._decided
                    or (self._inside and len(self._results) < self._rule.backlog)
                )
            )
            return not self._closed

    def _decide(self, step: int) -> None:
        """One step of all ranks: asks until it is decided, then reduces."""
        began = time.monotonic()
        quorum_at: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_ready(step) or self._closed, _POLL_S)
                ready = self._is_ready(step)
                rows = self._offer[1] if ready and self._offer is not None else 0
            overdue = False
            if quorum_at is not None and self.communicator.rank == 0:
                grace = max(self._rule.grace_s, self._rule.patience * (quorum_at - began))
                overdue = time.monotonic() - quorum_at > grace
            told = self._group.all_gather(np.array([ready, rows > 0, overdue], np.uint8))
            waiting = [rank for rank, answer in enumerate(told) if not answer[0]]
            with_rows = sum(int(answer[1]) for answer in told)
            self._missing = waiting
            if not waiting or any(answer[2] for answer in told):
                break
            needed = math.ceil(self._rule.least * (with_rows + len(waiting)) - 1e-9)
            if quorum_at is None and with_rows >= max(1, needed):
                quorum_at = time.monotonic()
        self._reduce_step(ready, rows)

    def _is_ready(self, step: int) -> bool:
        return self._offer is not None and self._offer[0] == step

    def _reduce_step(self, ready: bool, rows: int) -> None:
        result = self._spare.pop() if self._spare else np.empty_like(self.whole)
        source = self.whole if rows else result
        source[-1] = float(rows > 0)
        self.sent_bytes += result.nbytes
        self._group.all_reduce(source, "weighted", weight=rows, out=result)
        with self._changed:
            if ready:
                self._offer = None
            self._decided += 1
            self._results.append(result)
            self._changed.notify_all()
