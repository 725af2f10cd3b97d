"""``RuleSynchronizer``: trains by a rule of :mod:`sparkdl.collective.rules`.

A rule exchanges gradients or weights after every ``window`` steps, all ranks at the same step. A
rank that has no batch left takes part with zero rows.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.gradient_synchronizer import take_root_state
from sparkdl.collective.rules import (
    Exchange,
    ExchangeRule,
    GradientExchange,
    OptimizerExchange,
    Part,
    WeightsExchange,
)
from sparkdl.config import EPOCH_WINDOW
from sparkdl.errors import ConfigError
from sparkdl.files.model_file import unpack_arrays
from sparkdl.files.run_state import StoredBytes
from sparkdl.optimizers.flat import State
from sparkdl.training.changes import VariableChanges
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.learning import MAX_STACK, BatchStack, SharedLearner
from sparkdl.training.phases import current_clock
from sparkdl.training.syncing import StepSynchronizer
from sparkdl.weights import FloatArray, Layout, NotFiniteError, is_finite


def steps_of(exchange: Exchange, check: FiniteCheck) -> RuleSteps:
    """The steps that go with ``exchange``; ``check`` looks at what a rank computes for it.

    Raises:
        ConfigError: It is none of the three kinds.
    """
    if isinstance(exchange, GradientExchange):
        return GradientSteps(exchange, check)
    if isinstance(exchange, OptimizerExchange):
        return OptimizerSteps(exchange, check)
    if isinstance(exchange, WeightsExchange):
        return WeightsSteps(exchange, check)
    raise ConfigError(
        "this rule opens something that is no exchange",
        expected="a GradientExchange, WeightsExchange or OptimizerExchange",
        received=type(exchange).__name__,
        hint="ExchangeRule.open must return an object of a class derived from one of these",
    )


class RuleSteps(abc.ABC):
    """One rank's side of a rule; see :mod:`sparkdl.collective.rules`."""

    def start(self, learner: SharedLearner) -> None:  # noqa: B027  (the gradient needs nothing)
        """Called when the learner has the weights that all ranks begin with."""

    @abc.abstractmethod
    def take(self, learner: SharedLearner, stack: BatchStack) -> None:
        """Takes in some batches of this rank, all of them before the next exchange."""

    @abc.abstractmethod
    def exchange(self, learner: SharedLearner) -> int | None:
        """One exchange of all ranks; returns the next window's length if that changes."""

    def show_center(self, learner: SharedLearner) -> None:  # noqa: B027  (most rules have no center)
        """Gives the learner the weights that the ranks agree on, to be evaluated and kept."""

    def hide_center(self, learner: SharedLearner) -> None:  # noqa: B027
        """Gives the learner this rank's own weights again, after :meth:`show_center`."""

    fits = False
    """Whether the learner's optimizer has room for the rule's state."""

    def keep(self, learner: SharedLearner, state: State) -> None:  # noqa: B027
        """Puts the rule's state into the learner's optimizer, if it fits, and counts its steps."""

    def take_changes(self, changes: VariableChanges) -> None:  # noqa: B027
        """Called when the learner has been given ``changes``."""

    def finish(self, learner: SharedLearner) -> None:  # noqa: B027
        """Called after the last exchange."""


class FilledSteps(RuleSteps):
    """Collects the batches since the last exchange; their gradients become one."""

    def __init__(self, check: FiniteCheck) -> None:
        self._check = check
        self._parts: list[Part] = []
        self._computed = False

    def take(self, learner: SharedLearner, stack: BatchStack) -> None:
        for index in range(stack.num_batches):
            batch = stack.part(index)

            def compute(out: FloatArray, batch: BatchStack = batch) -> None:
                learner.gradients(batch, out)
                self._check.admits(out, learner.optimizer.scales_loss)
                self._computed = True

            self._parts.append((compute, batch.num_rows))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _agreed_by(self, communicator: Communicator, mine: list[bool]) -> list[bool]:
        """Which variables have a gradient; empty if no rank has computed one, and so knows."""
        known = np.array(mine if self._computed else [], np.uint8)
        gathered = [values for values in communicator.all_gather(known) if values.size]
        return np.any(gathered, axis=0).tolist() if gathered else []


class GradientSteps(FilledSteps):
    """The rule joins the ranks' gradients; each rank's optimizer takes the step."""

    def __init__(self, exchange: GradientExchange, check: FiniteCheck) -> None:
        super().__init__(check)
        self._exchange = exchange
        self._agreed = False

    def exchange(self, learner: SharedLearner) -> int | None:
        communicator = self._exchange.communicator

        def apply(buffer: FloatArray) -> None:
            if not self._agreed:
                self._agreed = True
                learner.know_gradients(lambda mine: self._agreed_by(communicator, mine))
            learner.apply_gradients(buffer)

        self._exchange.take_step(self._taken(), apply)
        return None


class OptimizerSteps(FilledSteps):
    """The rule takes the step itself; the learner's optimizer keeps its state between runs."""

    def __init__(self, exchange: OptimizerExchange, check: FiniteCheck) -> None:
        super().__init__(check)
        self._exchange = exchange
        self._knows_still = False

    def start(self, learner: SharedLearner) -> None:
        self._number = learner.optimizer.step
        names = self._exchange.keras_slots()
        slots = learner.optimizer.slots([slot for slot, _ in names.values()])
        self.fits = slots is not None
        if slots and self._number:
            state: State = {
                name: slots[slot] / np.float32(factor) for name, (slot, factor) in names.items()
            }
            self._exchange.load_state({**state, "steps": self._number})

    def exchange(self, learner: SharedLearner) -> int | None:
        rows = self._exchange.fill(self._taken())
        if not self._knows_still:
            learner.know_gradients(self._find_still)
        if learner.optimizer.scales_loss and not self._unscaled(learner, rows):
            return None
        if self._exchange.step(learner.weights_within, rows, learner.optimizer.learning_rate):
            learner.write_weights(self._exchange.buffer)
            self._number += 1
            learner.optimizer.set_step(self._number)
        return None

    def _unscaled(self, learner: SharedLearner, rows: int) -> bool:
        """Divides the gradient by the scale of the loss; False if it is not finite on a rank."""
        gradient = self._exchange.trained
        wrong = float(rows > 0 and not is_finite(gradient))
        told = np.array([wrong, float(rows)])
        wrong, together = self._exchange.communicator.all_reduce(told, "sum")
        if together:
            scale = learner.optimizer.end_scaled_step(not wrong)
            if not wrong:
                gradient *= np.float32(1 / scale)
        return bool(together and not wrong)

    def _find_still(self, mine: list[bool]) -> list[bool]:
        agreed = self._agreed_by(self._exchange.communicator, mine)
        if agreed:
            slots = zip(self._exchange.layout.slots, agreed, strict=False)
            still = [slice(s.offset, s.offset + s.size) for s, has in slots if not has]
            self._exchange.still, self._knows_still = still, True
        return agreed

    def take_changes(self, changes: VariableChanges) -> None:
        if changes.optimizer:
            raise ConfigError(
                "a callback wrote to the optimizer, whose state this rule keeps by itself",
                expected="callbacks that write the model's variables, or the learning rate",
                received=f"{len(changes.optimizer)} changed variables of the optimizer",
                hint="rule=None (the mean of the gradients) trains with Keras' optimizer",
            )

    def keep(self, learner: SharedLearner, state: State) -> None:
        names = self._exchange.keras_slots() if state and self.fits else {}
        slots = {slot: state[name] * np.float32(factor) for name, (slot, factor) in names.items()}
        learner.optimizer.load_slots(slots, self._number)


class WeightsSteps(RuleSteps):
    """Each rank trains on its own between two exchanges; the rule joins the weights."""

    def __init__(self, exchange: WeightsExchange, check: FiniteCheck) -> None:
        self._check = check
        self._exchange = exchange
        self._rows = 0
        self._shown = False
        self._counted = np.zeros(2)

    def start(self, learner: SharedLearner) -> None:
        self._flat = np.empty(self._exchange.layout.size, np.float32)
        learner.read_weights(self._flat)
        self._exchange.start(self._flat)

    def take(self, learner: SharedLearner, stack: BatchStack) -> None:
        learner.train(stack)
        self._rows += stack.num_rows

    def exchange(self, learner: SharedLearner) -> int | None:
        learner.read_weights(self._flat)
        self._check.admits(self._flat)
        loss = rate = None
        if self._exchange.adapts and self._rows:
            loss, rate = self._loss(learner), learner.optimizer.learning_rate
        window = self._exchange.after_window(self._flat, self._rows, loss, rate)
        learner.write_weights(self._flat)
        self._rows = 0
        return window

    def _loss(self, learner: SharedLearner) -> float | None:
        """Mean loss since the last exchange: Keras' first metric is its total and its count."""
        state = learner.metrics.state()
        if state.size < 2:
            return None
        total, count = state[:2] - self._counted
        self._counted = state[:2]
        return float(total / count) if count > 0 else None

    def take_changes(self, changes: VariableChanges) -> None:
        changes.write_into(self._flat)
        changes.write_into(self._exchange.center)

    def show_center(self, learner: SharedLearner) -> None:
        self._counted = np.zeros(2)  # metrics begin at zero with each epoch
        if self._exchange.apart:
            learner.write_weights(self._exchange.center)
            self._shown = True

    def hide_center(self, learner: SharedLearner) -> None:
        if self._shown:
            learner.write_weights(self._flat)
            self._shown = False

    def finish(self, learner: SharedLearner) -> None:
        learner.read_weights(self._flat)
        self._exchange.finish(self._flat)
        learner.write_weights(self._flat)


class RuleSynchronizer(StepSynchronizer):
    """Trains by a rule, and exchanges as it says.

    All ranks count the steps of an epoch in the same way, steps without a batch included. They
    exchange when ``window`` steps are done and at the end of an epoch. They agree on stopping with
    the first exchange after each :data:`~sparkdl.training.learning.MAX_STACK` steps.

    Args:
        communicator: Connected; used by this synchronizer alone while it trains.
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

    def start(
        self, learner: SharedLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        """Gives every rank the root's weights and optimizer state, and the rule its own state."""
        take_root_state(self._communicator, learner, self._exchange.buffer, root)
        if isinstance(self._exchange, OptimizerExchange):
            self._exchange.keeper = root
        self._steps_per_epoch = steps
        self._steps.start(learner)
        if self._given_state:
            arrays = unpack_arrays(self._given_state, "the state that a rule kept")
            self._exchange.load_state({k: v if v.ndim else v.item() for k, v in arrays.items()})
            self._given_state = b""

    def train(self, learner: SharedLearner, stack: BatchStack) -> None:
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

    @property
    def ranks_are_equal(self) -> bool:
        """Whether the rule exchanges gradients, or takes the step itself, at each step."""
        return self._window == 1 and not isinstance(self._steps, WeightsSteps)

    def end_epoch(self, learner: SharedLearner) -> None:
        """Gives the learner this rank's own weights again, if it had the center to be evaluated."""
        self._steps.hide_center(learner)
        self._step = 0

    def save_state(self, learner: SharedLearner) -> bytes | StoredBytes:
        """Puts the rule's optimizer state into the learner's optimizer, if it has room for it.

        A collective call.
        """
        if self._steps.fits:
            self._steps.keep(learner, self._exchange.state())
            return b""
        self._steps.keep(learner, {})
        return self._exchange.packed_state()

    def take_changes(self, learner: SharedLearner, changes: VariableChanges) -> None:
        """Gives the rule's own copies of the weights the same values."""
        self._steps.take_changes(changes)

    def end_run(self, learner: SharedLearner) -> bool:
        self._steps.hide_center(learner)
        with self._named(0):
            if self._since_exchange:
                self._exchange_now(learner)
            self._steps.finish(learner)
        return True

    def close(self) -> None:
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
