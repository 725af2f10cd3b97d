"""Every worker's change is added to the center, without waiting: DOWNPOUR, ADAG, Hogwild!, Geo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.optimizers.blocks import BLOCK, blocks
from sparkdl.optimizers.flat import take_adagrad_step
from sparkdl.rules.rule import PAYLOAD, Commit, Peer, Rule, State, learning_rate_of, unbound
from sparkdl.settings.values import one_word_of, option, require_bool, require_positive, whole_from
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class Downpour(Rule):
    """Adds each worker's whole change: ``center += delta``.

    The deltas of p workers add up, so the default window shrinks with their number; with many, an
    exchange after each batch learns best (``benchmarks/rules.py``). It also follows the
    length of the worker's epoch: the paper's 5 batches are too long for one of 60
    (``benchmarks/rules.py``).

    At a high learning rate even two changes add up to too much: workers see that and scale theirs
    down (:mod:`sparkdl.rules.damping`).

    Args:
        damping: Whether they do; False is the paper's rule.

    Reference: Dean et al., 2012, "Large Scale Distributed Deep Networks" (NIPS), section 4.1.
    """

    damping: bool = option(True, require_bool)

    name: ClassVar[str] = "downpour"
    default_window: ClassVar[int] = AUTO_WINDOW

    @property
    def damps(self) -> bool:
        return self.damping


@dataclass(frozen=True)
class DownpourAdagrad(Rule):
    """DOWNPOUR whose server has one Adagrad learning rate per coordinate.

    ::

        a      += g²
        center -= gamma · g / (√a + epsilon)

    ``g`` is the gradient of the worker's window. With payload ``'delta'`` (the worker trains with
    plain SGD in between) it is recovered as ``g = -delta / learning_rate``, the *sum* over the
    window; with payload ``'gradient'`` it is the mean gradient that the worker sends. As a constant
    factor of ``g`` cancels in ``g / √Σg²``, both give the same steps when windows are equally long.

    Args:
        gamma: Step size per coordinate.
        epsilon: Keeps the division finite where all gradients so far were 0.
        payload: What the worker sends.

    Reference: Dean et al., 2012, "Large Scale Distributed Deep Networks" (NIPS); Duchi, Hazan and
    Singer, 2011, "Adaptive Subgradient Methods" (JMLR 12).
    """

    gamma: float = option(0.01, require_positive)
    epsilon: float = option(1e-7, require_positive)
    payload: Literal["delta", "gradient"] = option("delta", PAYLOAD)

    name: ClassVar[str] = "downpour_adagrad"
    default_window: ClassVar[int] = 5
    elementwise: ClassVar[bool] = True

    def init(self, center: FloatArray) -> State:
        """One sum of squared gradients per coordinate, from 0."""
        return {"sum_of_squares": np.zeros_like(center)}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """One Adagrad step; raises ConfigError for deltas without a learning rate."""
        scale = 1.0 if self.payload == "gradient" else -1.0 / learning_rate_of(self.name, commit)
        take_adagrad_step(
            center, delta, state["sum_of_squares"], -self.gamma, out,
            gradient_per_sent=scale, beside_root=self.epsilon,
        )  # fmt: skip


@dataclass(frozen=True)
class Adag(Rule):
    """Adds each change divided by its number of batches: ``center += delta / window``.

    The window is the number of batches in this commit, so the shorter last window of an epoch is
    divided by its own length. A window of 1 is DOWNPOUR. Of the steps that p workers take the
    center keeps p / window. So the rule suits as many workers as a window has batches, or a
    learning rate that is higher by window / p.

    Reference: Hermans, Spanakis and Möckel, 2017, "Accumulated Gradient Normalization",
    arXiv:1710.02368.
    """

    name: ClassVar[str] = "adag"
    default_window: ClassVar[int] = 12

    def share_of(self, commit: Commit) -> float:
        return 1.0 / max(commit.batches, 1)


@dataclass(frozen=True)
class Hogwild(Rule):
    """Lock-free ``center_j += delta_j`` for every coordinate ``j`` with ``delta_j != 0``.

    No writer overwrites another one's whole update. Changes of different coordinates are all kept,
    since a coordinate with a zero change is not written at all. Of two writes to the same
    coordinate within nanoseconds one can be lost; to make that rare, each worker begins at another
    place of the center.

    With ``scale='mean'`` a worker adds only ``delta_j / workers``: for long windows, in which
    the workers' changes would together take the center too far.

    Args:
        scale: ``'sum'`` or ``'mean'``.
        damping: Whether workers scale their changes down where they add up to too much
            (:mod:`sparkdl.rules.damping`); only with ``'sum'``.

    Thread-safe: ``update`` may run in many threads (or, on shared memory, processes) on one center.

    Reference: Niu, Recht, Ré and Wright, 2011, "Hogwild!: A Lock-Free Approach to Parallelizing
    Stochastic Gradient Descent", arXiv:1106.5730.
    """

    scale: Literal["sum", "mean"] = option("sum", one_word_of("sum", "mean"))
    damping: bool = option(True, require_bool)

    name: ClassVar[str] = "hogwild"
    lock_free: ClassVar[bool] = True
    default_window: ClassVar[int] = AUTO_WINDOW
    elementwise: ClassVar[bool] = True

    @property
    def damps(self) -> bool:
        """True where changes are added up, unless ``damping`` is False."""
        return self.damping and self.scale == "sum"

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """Adds in place; ``out`` should be ``center`` (into another buffer it copies first)."""
        # With views of one buffer there is nothing to copy, and a copy would undo other writers.
        if not np.may_share_memory(out, center):
            np.copyto(out, center)
        count = -(-center.size // BLOCK)
        first = commit.worker * count // max(commit.num_workers, 1)
        share = None
        if self.scale == "mean" and commit.num_workers > 1:
            share = np.float32(1.0 / commit.num_workers)
        for part in blocks(center.size, first):
            target, change = out[part], delta[part]
            if share is not None:
                change = change * share
            moved = change != 0
            if moved.all():
                np.add(target, change, out=target)
            elif moved.any():
                np.add(target, change, out=target, where=moved)


@dataclass(frozen=True)
class GeoSGD(Rule):
    """Each worker sends a p-th of its change, and adds the others' changes to its weights.

    On the worker, every window (``old`` is ``base``)::

        d = (local - old) / p;   push d;   old += d
        pull center;             local += center - old;   old = center

    and on the server ``center += d``. Unlike DOWNPOUR, a worker keeps its own progress instead of
    jumping to the center. One worker alone always equals the center. Rows of tables on servers go
    the same way, those that the window has trained.

    Args:
        num_workers: p; ``bind`` fills it in.

    Reference: PaddlePaddle's Geo mode (``GeoCommunicator``), Baidu, 2020; the equations are
    written from its description.
    """

    num_workers: int | None = option(None, whole_from(1, or_none=True))

    name: ClassVar[str] = "geo"
    default_window: ClassVar[int] = 100
    rows_in_windows: ClassVar[bool] = True

    def bind(self, num_workers: int) -> GeoSGD:
        return replace(self, num_workers=num_workers)

    def exchange(self, local: FloatArray, base: FloatArray, peer: Peer) -> None:
        """Sends this worker's share, and adds the others' changes to ``local``."""
        if self.num_workers is None:
            raise unbound(self.name)
        np.subtract(local, base, out=peer.buffer)
        if self.num_workers > 1:
            np.multiply(peer.buffer, np.float32(1.0 / self.num_workers), out=peer.buffer)
        np.add(base, peer.buffer, out=base)
        peer.push_pull()
        np.subtract(local, base, out=local)
        np.add(local, peer.buffer, out=local)
        base[...] = peer.buffer
