"""How workers keep together by a rule of :mod:`sparkdl.collective.rules`.

NumPy and protocols only. A rule gets what it exchanges at every ``window`` steps, all ranks at the
same step: gradients of that many batches, or the weights after them. A rank that has run out of
batches takes part with nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules import (
    Exchange,
    ExchangeRule,
    GradientExchange,
    OptimizerExchange,
    Part,
    WeightsExchange,
)
from sparkdl.collective.synchronizer import GradientLearner, take_root_state
from sparkdl.config import EPOCH_WINDOW
from sparkdl.errors import ConfigError
from sparkdl.weights import FloatArray, Layout
from sparkdl.worker import MAX_PIECE


class RuleLearner(GradientLearner, Protocol):
    """What rules ask of a learner beyond :class:`GradientLearner`; see ``sparkdl.protocols``."""

    def train(self, window: Any) -> None: ...

    def know_gradients(self, agree: Callable[[list[bool]], list[bool]]) -> None: ...

    def metric_state(self) -> npt.NDArray[np.float64]: ...

    def optimizer_slots(self, names: list[str]) -> dict[str, FloatArray] | None: ...

    def load_optimizer_slots(self, slots: dict[str, FloatArray], step: int) -> None: ...

    def set_step(self, step: int) -> None: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def step(self) -> int: ...


class RuleSynchronizer:
    """Steps and exchanges of one rank; takes the place of a :class:`AllReduceGradientSynchronizer`.

    All ranks count the steps of an epoch alike, those without a batch included, and exchange when
    ``window`` of them are done and at the end of an epoch. They agree on stopping with the first
    exchange after each :data:`~sparkdl.worker.MAX_PIECE` steps.

    Args:
        communicator: Connected; used by this synchronizer alone while it trains.
        layout: Of the flat buffer.
        rule: Bound to the run.
        window: Steps between two exchanges; ``EPOCH_WINDOW`` for one at the end of each epoch.
        wire: ``'float16'`` or ``'bfloat16'``: what travels instead of float32, for rules with
            ``takes_halves``.
        state: What the rule's :meth:`state` of an earlier run returned; empty for none.

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
    ) -> None:
        self.stop_wanted = False
        self.stop_agreed = False
        self._communicator = communicator
        self._layout = layout
        self._exchange = rule.open(communicator, layout)
        self._exchange.wire = wire
        self._steps = _steps_for(self._exchange)
        self._given_state = state
        self._window = window
        self._steps_per_epoch = 0
        self._step = 0  # of this epoch
        self._since_exchange = 0
        self._since_agreement = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has given to the rule's collectives."""
        return self._exchange.sent_bytes

    def start(
        self, learner: RuleLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        """Gives every rank the root's weights and optimizer state, and the rule its own state.

        Args:
            learner: This rank's.
            root: The rank whose state all take.
            scale: Of no use here.
            steps: Steps of an epoch, the most of any rank.
        """
        take_root_state(self._communicator, learner, self._exchange.buffer, root)
        self._steps_per_epoch = steps
        self._steps.start(learner)
        if self._given_state:
            with np.load(io.BytesIO(self._given_state), allow_pickle=False) as arrays:
                self._exchange.load_state(
                    {k: int(v) if v.ndim == 0 else v for k, v in arrays.items()}
                )

    def train(self, learner: RuleLearner, window: Any) -> None:
        """Takes a step for each batch of ``window``, with the exchanges that fall among them."""
        first = 0
        while first < window.num_batches:
            count = min(window.num_batches - first, self._steps_to_exchange())
            self._steps.take(learner, window.part(first, count))
            self._count(learner, count)
            first += count

    def skip(self, learner: RuleLearner) -> None:
        """One step of the others in which this rank has no batch."""
        self._count(learner, 1)

    def end_epoch(self, learner: RuleLearner) -> None:
        """Goes on from this rank's own weights, where the epoch's end has shown the center."""
        self._steps.hide_center(learner)
        self._step = 0

    def save_state(self, learner: RuleLearner) -> bytes:
        """Puts the rule's optimizer state into the learner's optimizer, if it has room for it.

        A collective call.

        Returns:
            The state to go on from where the optimizer has no room for it; empty for none.
        """
        state = self._exchange.state()
        if self._steps.keep(learner, state) or not state:
            return b""
        buffer = io.BytesIO()
        np.savez(buffer, **state)
        return buffer.getvalue()

    def end_run(self, learner: RuleLearner) -> None:
        """Exchanges what is left of a window; the learner then has the run's model."""
        self._steps.hide_center(learner)
        if self._since_exchange:
            self._exchange_now(learner)
        self._steps.finish(learner)

    def close(self) -> None:
        """Ends the rule's threads and groups."""
        self._exchange.close()

    def _steps_to_exchange(self) -> int:
        left = max(1, self._steps_per_epoch - self._step)
        if self._window == EPOCH_WINDOW:
            return left
        return min(left, self._window - self._since_exchange)

    def _count(self, learner: RuleLearner, count: int) -> None:
        last = count >= self._steps_to_exchange()
        self._step += count
        self._since_exchange += count
        if not last:
            return
        self._exchange_now(learner)
        if self._step == self._steps_per_epoch:
            self._steps.show_center(learner)

    def _exchange_now(self, learner: RuleLearner) -> None:
        self._window = self._steps.exchange(learner) or self._window
        self._since_agreement += self._since_exchange
        self._since_exchange = 0
        if self._since_agreement >= MAX_PIECE:
            self._since_agreement = 0
            wish = np.array([self.stop_wanted], np.float32)
            self._communicator.all_reduce(wish, "max", out=wish)
            self.stop_agreed = self.stop_agreed or bool(wish[0])


class _Steps:
    """One kind of exchange; see :mod:`sparkdl.collective.rules`."""

    def start(self, learner: RuleLearner) -> None:
        """The learner has the weights that all begin with."""

    def take(self, learner: RuleLearner, window: Any) -> None:
        """Some batches of this rank, none of which is behind the next exchange."""
        raise NotImplementedError

    def exchange(self, learner: RuleLearner) -> int | None:
        """One exchange of all ranks; returns the next window's length if that changes."""
        raise NotImplementedError

    def show_center(self, learner: RuleLearner) -> None:
        """Gives the learner what the ranks agree on, to be evaluated and kept."""

    def hide_center(self, learner: RuleLearner) -> None:
        """Takes :meth:`show_center` back."""

    def keep(self, learner: RuleLearner, state: dict[str, Any]) -> bool:
        """Puts the rule's state into the learner's optimizer; False if it does not fit there."""
        return False

    def finish(self, learner: RuleLearner) -> None:
        """After the last exchange."""


class _FilledSteps(_Steps):
    """Gradients of the batches since the last exchange become one."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._computed = False

    def take(self, learner: RuleLearner, window: Any) -> None:
        for index in range(window.num_batches):
            batch = window.part(index)

            def compute(out: FloatArray, batch: Any = batch) -> None:
                learner.gradients(batch, out)
                self._computed = True

            self._parts.append((compute, batch.num_rows))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class _GradientSteps(_FilledSteps):
    """The rule joins gradients; each rank's optimizer takes the step."""

    def __init__(self, exchange: GradientExchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._agreed = False

    def exchange(self, learner: RuleLearner) -> int | None:
        def apply(buffer: FloatArray) -> None:
            if not self._agreed:
                self._agreed = True
                learner.know_gradients(self._agree)
            learner.apply_gradients(buffer)

        self._exchange.take_step(self._taken(), apply)
        return None

    def _agree(self, mine: list[bool]) -> list[bool]:
        """Which variables have a gradient: a rank that has computed none cannot know."""
        known = np.array(mine if self._computed else [], np.uint8)
        told = [v for v in self._exchange.communicator.all_gather(known) if v.size]
        return np.any(told, axis=0).tolist() if told else []


class _OptimizerSteps(_FilledSteps):
    """The rule takes the step itself; the learner's optimizer keeps its state between runs."""

    def __init__(self, exchange: OptimizerExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def start(self, learner: RuleLearner) -> None:
        self._flat = np.empty(self._exchange.layout.size, np.float32)
        learner.read_weights(self._flat)
        self._exchange.start(self._flat)
        self._number = learner.step
        names = self._exchange.optimizer.keras_slots()
        slots = learner.optimizer_slots([slot for slot, _ in names.values()])
        self._fits = slots is not None
        if slots and self._number:
            state: dict[str, Any] = {
                name: slots[slot] / np.float32(factor) for name, (slot, factor) in names.items()
            }
            self._exchange.load_state({**state, "steps": self._number})

    def exchange(self, learner: RuleLearner) -> int | None:
        rows = self._exchange.fill(self._taken())
        if self._exchange.step(self._flat, rows, learner.learning_rate):
            learner.write_weights(self._flat)
            self._number += 1
            learner.set_step(self._number)
        return None

    def keep(self, learner: RuleLearner, state: dict[str, Any]) -> bool:
        if self._fits:
            names = self._exchange.optimizer.keras_slots()
            slots = {
                slot: state[name] * np.float32(factor) for name, (slot, factor) in names.items()
            }
            learner.load_optimizer_slots(slots, self._number)
        return self._fits


class _WeightsSteps(_Steps):
    """Each rank trains on its own; the rule joins the weights."""

    def __init__(self, exchange: WeightsExchange) -> None:
        self._exchange = exchange
        self._rows = 0
        self._shown = False
        self._told = np.zeros(2)

    def start(self, learner: RuleLearner) -> None:
        self._flat = np.empty(self._exchange.layout.size, np.float32)
        learner.read_weights(self._flat)
        self._exchange.start(self._flat)

    def take(self, learner: RuleLearner, window: Any) -> None:
        learner.train(window)
        self._rows += window.num_rows

    def exchange(self, learner: RuleLearner) -> int | None:
        learner.read_weights(self._flat)
        loss = rate = None
        if self._exchange.adapts and self._rows:
            loss, rate = self._loss(learner), learner.learning_rate
        window = self._exchange.after_window(self._flat, self._rows, loss, rate)
        learner.write_weights(self._flat)
        self._rows = 0
        return window

    def _loss(self, learner: RuleLearner) -> float | None:
        """Mean loss since the last exchange: Keras' first metric is its total and its count."""
        state = learner.metric_state()
        if state.size < 2:
            return None
        total, count = state[:2] - self._told
        self._told = state[:2]
        return float(total / count) if count > 0 else None

    def show_center(self, learner: RuleLearner) -> None:
        self._told = np.zeros(2)  # metrics begin anew with each epoch
        if self._exchange.apart:
            learner.write_weights(self._exchange.center)
            self._shown = True

    def hide_center(self, learner: RuleLearner) -> None:
        if self._shown:
            learner.write_weights(self._flat)
            self._shown = False

    def finish(self, learner: RuleLearner) -> None:
        learner.read_weights(self._flat)
        self._exchange.finish(self._flat)
        learner.write_weights(self._flat)


def _steps_for(exchange: Exchange) -> _Steps:
    if isinstance(exchange, GradientExchange):
        return _GradientSteps(exchange)
    if isinstance(exchange, OptimizerExchange):
        return _OptimizerSteps(exchange)
    if isinstance(exchange, WeightsExchange):
        return _WeightsSteps(exchange)
    raise ConfigError(
        "this rule opens something that is no exchange",
        expected="a GradientExchange, WeightsExchange or OptimizerExchange",
        received=type(exchange).__name__,
    )
