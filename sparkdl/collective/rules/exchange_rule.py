"""Rules of ``mode='allreduce'``: frozen options, and the exchange opened from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from sparkdl.codecs.quantized import to_summable
from sparkdl.collective.communicator import Communicator
from sparkdl.errors import ConfigError
from sparkdl.files.model_file import pack_arrays
from sparkdl.files.run_state import StoredBytes
from sparkdl.optimizers.flat import FlatOptimizer, Made, State
from sparkdl.rules.rule import Rule
from sparkdl.settings.values import Options
from sparkdl.weights import FloatArray, Layout

Part = tuple[Callable[[FloatArray], None], int]
"""One batch: what writes its ``[mean gradient | statistics]`` into a buffer, and its rows."""
WeightsWithin = Callable[[slice], Iterable[tuple[slice, FloatArray]]]
"""Gives copies of the weights in one part of the flat buffer, piece by piece."""


@dataclass(frozen=True)
class ExchangeRule(Options):
    """Base of the rules: options, checked when made; picklable.

    Class attributes:
        exchanges: ``'gradient'``, ``'weights'`` or ``'optimizer'``: what :meth:`open` gives, a
            :class:`GradientExchange`, :class:`WeightsExchange` or :class:`OptimizerExchange`.
        default_window: Batches between two exchanges if the user says ``frequency='auto'``.
        exact: Whether N workers take the steps of one process on the global batch.
        takes_halves: Whether what it reduces may be sent in 16 bits: plain sums and means.
        own_window: The rule chooses the window itself: ``frequency`` is left at ``'auto'``.
    """

    exchanges: ClassVar[Literal["gradient", "weights", "optimizer"]] = "gradient"
    default_window: ClassVar[int] = 1
    exact: ClassVar[bool] = False
    takes_halves: ClassVar[bool] = False
    own_window: ClassVar[bool] = False

    def bind(self, num_workers: int, optimizer: Mapping[str, Any] | None = None) -> Self:
        """The rule to use in a run, with options that depend on it filled in; called on the driver.

        Args:
            num_workers: Ranks of the run.
            optimizer: The compiled optimizer as ``keras.optimizers.serialize`` gives it; only
                rules that exchange ``'optimizer'`` look at it.

        Raises:
            ConfigError: The rule cannot work with that many ranks, or with that optimizer.
        """
        return self

    def open(self, communicator: Communicator, layout: Layout) -> Exchange:
        """The exchange of one rank; every rank calls it at the same time.

        Args:
            communicator: Connected. Whoever else uses it calls its operations in the same order on
                all ranks.
            layout: Layout of the flat buffer.

        Raises:
            ConfigError: As for :meth:`bind`.
        """
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The constructor arguments, as plain values."""
        given = super().config().items()
        return {n: v.keras_config() if isinstance(v, FlatOptimizer) else v for n, v in given}


def bound_optimizer(optimizer: Made | None, rule: ExchangeRule) -> Made:
    """The optimizer of a rule, which :meth:`ExchangeRule.bind` gives it; else ConfigError."""
    if optimizer is None:
        raise ConfigError(
            f"rule {rule.name!r} has no optimizer", received="optimizer=None",
            expected="bind(num_workers, optimizer) before open(), or "
            f"{type(rule).__name__}(optimizer=...)",
            hint="SparkModel.fit binds the rule to the compiled optimizer",
        )  # fmt: skip
    return optimizer


class Exchange:
    """Base of the exchanges: one rank's buffers and state. One thread uses it.

    Args:
        communicator: Connected.
        layout: Layout of the flat buffer.
        extras: How many further values are averaged together with the statistics.
    """

    def __init__(self, communicator: Communicator, layout: Layout, extras: int = 0) -> None:
        self.communicator = communicator
        self.layout = layout
        self.wire: str | None = None
        """``'float16'`` or ``'bfloat16'``: how the trained section is sent; None: as float32."""
        self.sent_bytes = 0
        """Bytes of the arrays that this rank gave to collective operations."""
        size, trained = layout.size, layout.trained_size
        self.whole = np.zeros(size + extras + 1, np.float32)
        """``[buffer | extras | flag]``; the flag is 1 on a rank with rows, so its mean is above 0
        exactly if any rank has rows."""
        self.buffer = self.whole[:size]
        """``[trained | averaged]``, of the layout."""
        self.trained = self.whole[:trained]
        self.tail = self.whole[trained:]
        """All but the trained section."""
        self.extras = self.whole[size:-1]

    def state(self) -> State:
        """The state from which a second run goes on: names to arrays or ints, equal on all ranks.

        A collective call. Empty where a second run needs nothing.
        """
        return {}

    def packed_state(self) -> bytes | StoredBytes:
        """The same as bytes; a collective call."""
        state = self.state()
        return pack_arrays(state) if state else b""

    def load_state(self, state: State) -> None:
        """The counterpart of :meth:`state`, behind :meth:`WeightsExchange.start`, if any."""

    def close(self) -> None:
        """Ends threads and groups; the communicator stays open. Can be repeated."""

    def all_reduce(self, array: FloatArray, op: str, rows: int = 1) -> None:
        """An all-reduce in place, counted; :attr:`wire` applies to the trained section."""
        if self.wire is not None and array is self.whole:
            self.all_reduce(self.tail, op, rows)
            array = self.trained
        sent: np.ndarray[Any, Any] = array
        if self.wire is not None and array is self.trained:
            sent = to_summable(array, self.wire, self.communicator.size if op == "sum" else 1)
        self.sent_bytes += sent.nbytes
        self.communicator.all_reduce(sent, op, weight=rows, out=sent)
        if sent is not array:
            np.copyto(array, sent, casting="unsafe")

    def average(self, array: FloatArray, rows: int) -> bool:
        """Row-weighted mean, in place, of an array that ends with the flag.

        Returns:
            Whether any rank had rows.
        """
        array[-1] = float(rows > 0)
        self.all_reduce(array, "weighted", rows)
        return bool(array[-1] > 0.0)

    def all_gather(self, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Every rank's array, counted."""
        self.sent_bytes += array.nbytes
        return self.communicator.all_gather(array)


class FilledExchange(Exchange):
    """An exchange whose :attr:`buffer` holds ``[gradient | statistics]`` of this rank's batches."""

    _sum: FloatArray | None = None

    def fill(self, parts: Sequence[Part]) -> int:
        """Computes ``Σ n_i g_i / Σ n_i`` over this rank's batches into :attr:`buffer`.

        More than one batch is gradient accumulation: equal to one batch of all their rows.

        Args:
            parts: Batches; none if this rank has no more rows.

        Returns:
            Their rows.

        Raises:
            ConfigError: A batch without rows.
        """
        if any(rows < 1 for _, rows in parts):
            raise ConfigError(
                "a batch of a step has no rows", expected="at least one row in each batch",
                received=f"rows {[rows for _, rows in parts]}",
                hint="a rank without rows passes no batch",
            )  # fmt: skip
        total = sum(rows for _, rows in parts)
        if len(parts) == 1:
            parts[0][0](self.buffer)
        elif parts:
            if self._sum is None:
                self._sum = np.empty_like(self.buffer)
            self._sum.fill(0.0)
            for compute, rows in parts:
                compute(self.buffer)
                self.buffer *= np.float32(rows / total)
                self._sum += self.buffer
            np.copyto(self.buffer, self._sum)
        return total


class GradientExchange(FilledExchange):
    """Combines gradients; every rank's own optimizer takes the step. Ranks stay equal."""

    def reduce(self, rows: int) -> bool:
        """Replaces :attr:`buffer` by the combined one, the same bits on all ranks.

        The statistics become their row-weighted mean. A rank without rows contributes nothing,
        whatever its buffer holds.

        Args:
            rows: Rows behind this rank's buffer; 0 for none.

        Returns:
            Whether any rank had rows; if none had, the buffer is undefined.
        """
        raise NotImplementedError

    def take_step(self, parts: Sequence[Part], apply: Callable[[FloatArray], None]) -> bool:
        """Fills, reduces and applies: one step of all ranks together.

        Args:
            parts: This rank's batches (see :meth:`fill`); none if it has no more rows.
            apply: One optimizer step with a buffer that holds ``[gradient | statistics]``.

        Returns:
            Whether any rank had rows; if none had, nothing is applied.
        """
        if not self.reduce(self.fill(parts)):
            return False
        apply(self.buffer)
        return True


class WeightsExchange(Exchange):
    """Joins the ranks' weights after each window, in which every rank has trained on its own."""

    center: FloatArray
    """Weights that are equal on all ranks: the model to evaluate or to save."""
    apart: ClassVar[bool] = False
    """Whether the ranks' weights differ from the center after an exchange."""
    adapts: ClassVar[bool] = False
    """Whether :meth:`after_window` needs the loss and the learning rate."""

    def start(self, weights: FloatArray) -> None:
        """Takes the weights that all ranks begin with (equal on all)."""
        self.center = weights.copy()

    def after_window(
        self,
        weights: FloatArray,
        rows: int,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> int | None:
        """One exchange of all ranks.

        Args:
            weights: This rank's, of the layout; become what it trains on next.
            rows: Rows trained since the last exchange; 0 for none.
            loss: Mean loss over them, for rules that adapt.
            learning_rate: The rank's, for rules that adapt.

        Returns:
            Batches to the next exchange, the same on all ranks; None leaves the window as it is.
        """
        raise NotImplementedError

    def finish(self, weights: FloatArray) -> None:
        """Ends the run: waits for what is still being exchanged; ``weights`` become the center."""
        np.copyto(weights, self.center)


class OuterExchange(WeightsExchange):
    """Moves its center by the ``update`` of a rule of :mod:`sparkdl.rules`; equal on all ranks.

    Args:
        communicator, layout, extras: As for :class:`Exchange`.
    """

    def __init__(
        self, communicator: Communicator, layout: Layout, outer: Rule, extras: int = 0
    ) -> None:
        super().__init__(communicator, layout, extras)
        self.outer = outer
        self.outer_state: State = {}
        """The state that ``outer`` keeps beside the center's trained section."""

    def start(self, weights: FloatArray) -> None:
        super().start(weights)
        self.outer_state = self.outer.init(self.center[: self.layout.trained_size])

    def state(self) -> State:
        return copy.deepcopy(self.outer_state)

    def load_state(self, state: State) -> None:
        self.outer_state = copy.deepcopy(state)


class OptimizerExchange(FilledExchange):
    """Takes the place of the optimizer: gradients go in, weights come out.

    :meth:`state` is that of :attr:`optimizer` over the whole trained section, as one process would
    have it; so the compiled Keras optimizer can keep it from one run to the next. No whole copy of
    the weights is held here: the learner has them.
    """

    optimizer: FlatOptimizer

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        """Attributes of the compiled Keras optimizer that have the state; see the optimizer's."""
        return self.optimizer.keras_slots()

    keeper: int | None = None
    """The one rank on which :meth:`state` is wanted; None: on all."""
    still: Sequence[slice] = ()
    """Places of the variables without gradient, which no optimizer of Keras moves, or decays."""

    def hold_still(self, weights_within: WeightsWithin, part: slice) -> None:
        """Gives the places of :attr:`still` within ``part`` of the new weights the present ones."""
        for still in self.still:
            for place, values in weights_within(
                slice(max(still.start, part.start), min(still.stop, part.stop))
            ):
                self.buffer[place] = values

    def step(
        self, weights_within: WeightsWithin, rows: int, learning_rate: float | None = None
    ) -> bool:
        """One step of all ranks with the gradient in :attr:`buffer` (see :meth:`fill`).

        Args:
            weights_within: Gives the present weights of a part of the layout.
            rows: Rows behind this rank's gradient; 0 for none.
            learning_rate: The one to use; None: the optimizer's own.

        Returns:
            Whether any rank had rows; then :attr:`buffer` has the new weights, equal on all ranks.
            If none had, nothing changes.

        Raises:
            ConfigError: No learning rate, here or in the optimizer.
        """
        raise NotImplementedError


def choose_rate(rule: str, given: float | None, own: float | None) -> float:
    """The learning rate given, else the optimizer's own.

    Raises:
        ConfigError: Neither is there.
    """
    rate = own if given is None else given
    if rate is None:
        raise ConfigError(
            f"rule {rule!r} has no learning rate",
            expected="a learning rate with each step, or in the optimizer", received="none",
            hint="compile the model with an optimizer that has a learning rate",
        )  # fmt: skip
    return float(rate)
