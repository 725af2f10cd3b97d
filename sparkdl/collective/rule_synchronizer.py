"""``RuleSynchronizer``: trains by a rule of :mod:`sparkdl.collective.rules`.

A rule exchanges gradients or weights after every ``window`` steps, all ranks at the same step. A
rank that has no batch left takes part with zero rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sparkdl.changes import VariableChanges
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.gradient_synchronizer import take_root_state
from sparkdl.collective.rule_steps import steps_of
from sparkdl.collective.rules import ExchangeRule
from sparkdl.config import EPOCH_WINDOW
from sparkdl.files.packed_arrays import pack_arrays, unpack_arrays
from sparkdl.finite import FiniteCheck, NotFiniteError
from sparkdl.learning import MAX_STACK, BatchStack, SharedLearner
from sparkdl.phases import current_clock
from sparkdl.weights import Layout


class RuleSynchronizer:
    """The steps and exchanges of one rank, as ``StepSynchronizer`` describes them.

    All ranks count the steps of an epoch in the same way, steps without a batch included. They
    exchange when ``window`` steps are done and at the end of an epoch. They agree on stopping with
    the first exchange after each :data:`~sparkdl.learning.MAX_STACK` steps.

    Args:
        communicator: Connected; used by this synchronizer alone while it trains.
        layout: Of the flat buffer.
        rule: Bound to the run.
        window: Steps between two exchanges; ``EPOCH_WINDOW`` for one at the end of each epoch.
        wire: ``'float16'`` or ``'bfloat16'``: what is sent instead of float32, for rules with
            ``takes_halves``.
        state: What :meth:`save_state` of an earlier run returned; empty for none.
        check: Raises before gradients or weights are sent that are not finite; None: nobody does.

    Raises:
        ConfigError: The rule does not work with that many ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        rule: ExchangeRule,
        window: int = 1,
        *,
        wire: str | None = None,
        state: bytes = b"",
        check: FiniteCheck | None = None,
    ) -> None:
        self.stop_wanted = False
        self.stop_agreed = False
        self._communicator = communicator
        self._layout = layout
        self._exchange = rule.open(communicator, layout)
        self._exchange.wire = wire
        self._steps = steps_of(self._exchange, check or FiniteCheck("ignore", layout.trained_size))
        self._clock = current_clock()
        self._given_state = state
        self._window = window
        self._steps_per_epoch = 0
        self._step = 0  # of this epoch
        self._since_exchange = 0
        self._since_agreement = 0
        self._batches = 0  # of this rank since the last exchange

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has given to the rule's collectives."""
        return self._exchange.sent_bytes

    def start(
        self, learner: SharedLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        """Gives every rank the root's weights and optimizer state, and the rule its own state.

        Args:
            learner: This rank's.
            root: The rank whose state all take.
            scale: Not used here.
            steps: Steps of an epoch, the most of any rank.
        """
        take_root_state(self._communicator, learner, self._exchange.buffer, root)
        self._steps_per_epoch = steps
        self._steps.start(learner)
        if self._given_state:
            arrays = unpack_arrays(self._given_state, "the state that a rule kept")
            self._exchange.load_state({k: v if v.ndim else v.item() for k, v in arrays.items()})

    def train(self, learner: SharedLearner, stack: BatchStack) -> None:
        """Takes a step for each batch of ``stack``, with the exchanges that fall among them."""
        first = 0
        while first < stack.num_batches:
            count = min(stack.num_batches - first, self._steps_to_exchange())
            self._batches += count
            with self._named(first + count):
                self._steps.take(learner, stack.part(first, count))
                self._count(learner, count)
            first += count

    def skip(self, learner: SharedLearner) -> None:
        """Counts one step of the other ranks; this rank has no batch for it."""
        with self._named(0):
            self._count(learner, 1)

    def end_epoch(self, learner: SharedLearner) -> None:
        """Gives the learner this rank's own weights again, if it had the center to be evaluated."""
        self._steps.hide_center(learner)
        self._step = 0

    def save_state(self, learner: SharedLearner) -> bytes:
        """Puts the rule's optimizer state into the learner's optimizer, if it has room for it.

        A collective call.

        Returns:
            The state to go on from where the optimizer has no room for it; empty for none.
        """
        state = self._exchange.state()
        if self._steps.keep(learner, state) or not state:
            return b""
        return pack_arrays(state)

    def take_changes(self, learner: SharedLearner, changes: VariableChanges) -> None:
        """Gives the rule's own copies of the weights the same values."""
        self._steps.take_changes(changes)

    def end_run(self, learner: SharedLearner) -> bool:
        """Exchanges what is left of a window; the learner then has the run's model."""
        self._steps.hide_center(learner)
        with self._named(0):
            if self._since_exchange:
                self._exchange_now(learner)
            self._steps.finish(learner)
        return True

    def close(self) -> None:
        """Ends the rule's threads and groups."""
        self._exchange.close()

    @contextmanager
    def _named(self, last: int) -> Iterator[None]:
        """Says of what is not finite which batches may have made it: those up to ``last``."""
        try:
            yield
        except NotFiniteError:
            raise NotFiniteError(among=(last - self._batches, last)) from None

    def _steps_to_exchange(self) -> int:
        left = max(1, self._steps_per_epoch - self._step)
        if self._window == EPOCH_WINDOW:
            return left
        return min(left, self._window - self._since_exchange)

    def _count(self, learner: SharedLearner, count: int) -> None:
        last = count >= self._steps_to_exchange()
        self._step += count
        self._since_exchange += count
        if not last:
            return
        self._exchange_now(learner)
        if self._step == self._steps_per_epoch:
            self._steps.show_center(learner)

    def _exchange_now(self, learner: SharedLearner) -> None:
        with self._clock.within("exchange"):
            self._window = self._steps.exchange(learner) or self._window
        self._since_agreement += self._since_exchange
        self._since_exchange = self._batches = 0
        if self._since_agreement >= MAX_STACK:
            self._since_agreement = 0
            wish = np.array([self.stop_wanted], np.float32)
            self._communicator.all_reduce(wish, "max", out=wish)
            self.stop_agreed = self.stop_agreed or bool(wish[0])
