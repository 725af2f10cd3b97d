"""An update rule: a pure function on flat float32 buffers, in two halves.

The *server half* (``init``, ``update``) says how a commit changes the center. The *worker half*
(``exchange``) says what a worker sends and what it takes back. A rule of your own subclasses
:class:`Rule` and overrides what differs; nothing else in the library needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.optimizers.blocks import add_scaled
from sparkdl.optimizers.flat import State
from sparkdl.settings.values import Options, one_word_of
from sparkdl.weights import FloatArray

__all__ = ["PAYLOAD", "Commit", "Peer", "Rule", "State", "learning_rate_of", "unbound"]


@dataclass(frozen=True)
class Commit:
    """The facts about one commit when the rule is applied.

    Args:
        worker: Rank of the sender.
        num_workers: Workers of the run.
        clock: Commits applied before this one.
        pulled_clock: The clock that the worker's last pull returned.
        batches: Batches trained since that pull (the window, or less at the end of an epoch).
        rows: Rows in those batches.
        learning_rate: The worker's learning rate now (0.0 when it has none).
    """

    worker: int
    num_workers: int
    clock: int
    pulled_clock: int
    batches: int
    rows: int
    learning_rate: float = 0.0

    @property
    def staleness(self) -> int:
        """Commits that others made between this worker's pull and this commit."""
        return self.clock - self.pulled_clock


class Peer(Protocol):
    """The server as a rule's worker half sees it: one buffer, and three requests.

    ``buffer`` has the layout's size. A push sends its content; a pull replaces its content by the
    center. Its content is undefined after a push without a pull.
    """

    @property
    def buffer(self) -> FloatArray: ...

    def push(self) -> None: ...

    def pull(self) -> None: ...

    def push_pull(self) -> None: ...


class Rule(Options):
    """Base of all rules; what a subclass does not override is as in DOWNPOUR.

    Class attributes:
        payload: ``'delta'`` (change of the weights over a window) or ``'gradient'`` (each step).
        blocking: The server waits for all workers; ``update`` gets the row-weighted mean of what
            they sent.
        lock_free: The server applies ``update`` without a lock (Hogwild!).
        default_window: Batches between two exchanges if the user says ``frequency='auto'``;
            0 is one whole epoch, -1 (``sparkdl.config.AUTO_WINDOW``) follows its length.
        independent: The workers never share weights (ensemble): each rank's model is a result of
            its own and must come back from that rank, not from the server.
        elementwise: ``update`` treats each weight by itself, so that several servers may each hold
            a range of them. To be said by the class that has the ``update``: a rule that looks at
            the whole vector, for a norm say, would take each server's range for it.
        rows_in_windows: Rows of tables are exchanged with the weights, by their changes; else each
            batch is a step of its rows on the servers.

    What the reply to a push holds: the center, except for a rule that is ``blocking`` with payload
    ``'gradient'``, whose reply is the mean gradient, to be applied by each worker's own optimizer.
    ``exchange`` is for payload ``'delta'``; with ``'gradient'`` a worker pushes the mean gradient
    of its window, and a rule that does not block then has it train on from the center it gets.

    A rule is frozen once made: options are constructor arguments, checked there. What changes
    while training lives in the ``state`` that ``init`` returns.
    """

    payload: Literal["delta", "gradient"] = "delta"
    blocking: ClassVar[bool] = False
    lock_free: ClassVar[bool] = False
    default_window: ClassVar[int] = 8
    independent: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    rows_in_windows: ClassVar[bool] = False

    @property
    def splits(self) -> bool:
        """Whether several servers may hold the weights: ``elementwise``, for this ``update``."""
        lineage = type(self).__mro__
        updates = next(place for place, cls in enumerate(lineage) if "update" in vars(cls))
        says = next(place for place, cls in enumerate(lineage) if "elementwise" in vars(cls))
        return self.elementwise and says <= updates

    @property
    def replies_mean(self) -> bool:
        """Whether ``update`` writes the mean that it gets into ``out`` and does nothing else: then
        it is not called. For rules that block and take gradients."""
        return False

    def bind(self, num_workers: int) -> Rule:
        """The rule to use in a run of ``num_workers``, with options that depend on it filled in.

        Called once on the driver before anything starts, and again if the number changes.

        Raises:
            ConfigError: The rule cannot work with that many workers.
        """
        return self

    @property
    def damps(self) -> bool:
        """Whether a worker may scale its changes down (:mod:`sparkdl.rules.damping`).

        For rules that add up the whole changes of all workers. What ``exchange`` sends is then
        scaled, so it must be a change.
        """
        return False

    def local_optimizer(self) -> dict[str, Any] | None:
        """Keras optimizer config that the workers must train with; None leaves the user's own."""
        return None

    def init(self, center: FloatArray) -> State:
        """Returns what the rule keeps on the server beside the center (buffers, moments).

        A flat dict: names to float32 arrays, ints or floats, so that a checkpoint can hold it.
        """
        return {}

    def pulled(self, center: FloatArray, state: State, worker: int) -> None:
        """Tells the rule that ``worker`` now has ``center``.

        Called under the lock for a pull that is not the second half of a ``push_pull`` (there,
        ``update`` itself stands for it): a first pull, a late or retried worker. May change
        ``state`` only.
        """

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """Writes the new center into ``out``, which may be ``center`` itself.

        ``out = center + share_of(commit) · delta``. Acts on the trained section only. Must not
        change ``delta``, nor ``center`` unless it is ``out``; may change ``state``.
        """
        add_scaled(center, delta, self.share_of(commit), out)

    def share_of(self, commit: Commit) -> float:
        """The part of a change by which a commit moves the center."""
        return 1.0

    @property
    def gated(self) -> bool:
        """Whether the rule has a :meth:`may_continue` of its own: workers may wait for others."""
        return type(self).may_continue is not Rule.may_continue

    def may_continue(self, clock: int, slowest_clock: int) -> bool:
        """Whether a worker with ``clock`` commits may go on while the slowest has fewer."""
        return True

    def exchange(self, local: FloatArray, base: FloatArray, peer: Peer) -> None:
        """One exchange on the worker: sends through ``peer`` and brings ``local`` up to date.

        Args:
            local: The worker's weights; changed in place to what it trains on next.
            base: The center at the last exchange; changed in place for the next one.
            peer: Sends and receives.
        """
        np.subtract(local, base, out=peer.buffer)
        peer.push_pull()
        local[...] = peer.buffer
        base[...] = peer.buffer


PAYLOAD = one_word_of("delta", "gradient")


def learning_rate_of(rule: str, commit: Commit) -> float:
    """The learning rate of a commit whose rule cannot do without it.

    Raises:
        ConfigError: It is 0 or not finite.
    """
    rate = commit.learning_rate
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(
            f"rule {rule!r}: worker {commit.worker} committed without a learning rate",
            expected="a learning rate above 0: the rule turns a delta into a gradient with it",
            received=repr(rate),
            hint="compile the model with an optimizer that has a learning rate above 0, "
            "or choose rule='dynsgd', which needs none",
        )
    return rate


def unbound(rule: str) -> ConfigError:
    """The error of a rule that must know the number of workers and was not told."""
    return ConfigError(
        f"rule {rule!r}: the number of workers is not known",
        expected="a rule returned by Rule.bind(num_workers)", received="the rule as it was made",
        hint="call rule = rule.bind(num_workers) before training",
    )  # fmt: skip


_VALUES = ("payload", "blocking", "lock_free", "default_window", "independent", "elementwise")
_METHODS = ("local_optimizer", "init", "pulled", "update", "may_continue", "exchange", "config")


class AdaptedRule(Rule):
    """A rule with every part of :class:`Rule` that ``inner`` has; made by :func:`adapt`."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def bind(self, num_workers: int) -> Rule:
        """As the inner object's ``bind``, if it has one."""
        bound = self.inner.bind(num_workers) if hasattr(self.inner, "bind") else self.inner
        return self if bound is self.inner else adapt(bound)

    def config(self) -> dict[str, Any]:
        """The inner object's own attributes."""
        return dict(vars(self.inner)) if hasattr(self.inner, "__dict__") else {}

    def __reduce__(self) -> tuple[Any, ...]:
        return adapt, (self.inner,)

    def __repr__(self) -> str:
        return f"AdaptedRule({self.inner!r})"


def adapt(inner: object) -> AdaptedRule:
    """A rule around ``inner``; picklable if ``inner`` is.

    Each gets a class of its own, so that a server can see from the class, as it does for every
    rule, which parts were overridden.
    """
    parts: dict[str, Any] = {"name": getattr(inner, "name", "") or type(inner).__name__.lower()}
    parts.update({part: getattr(inner, part) for part in _VALUES if hasattr(inner, part)})
    parts.update({part: _delegate(part) for part in _METHODS if hasattr(inner, part)})
    made: AdaptedRule = type("AdaptedRule", (AdaptedRule,), parts)(inner)
    return made


def _delegate(part: str) -> Callable[..., Any]:
    def call(self: AdaptedRule, *args: object, **kwargs: object) -> Any:
        return getattr(self.inner, part)(*args, **kwargs)

    return call
