"""Hogwild!: all workers write into the center at once, coordinate by coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from sparkdl.config import AUTO_WINDOW
from sparkdl.optimizers.blocks import BLOCK, blocks
from sparkdl.rules.rule import Commit, Rule, State
from sparkdl.settings.values import require_bool, require_one_of
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class Hogwild(Rule):
    """Lock-free ``center_j += delta_j`` for every coordinate ``j`` with ``delta_j != 0``.

    No writer overwrites another one's whole update. Changes of different coordinates are all kept,
    since a coordinate with a zero change is not written at all. Of two writes to the same
    coordinate within nanoseconds one can be lost; to make that rare, each worker begins at another
    place of the center.

    With ``scale='mean'`` a worker adds only ``delta_j / workers``: for windows so long that the
    workers' changes would take the center too far together.

    Args:
        scale: ``'sum'`` or ``'mean'``.
        damping: Whether workers scale their changes down where they add up to too much
            (:mod:`sparkdl.ps.damping`); only with ``'sum'``.

    Thread-safe: ``update`` may run in many threads (or, on shared memory, processes) on one center.

    Reference: Niu, Recht, Ré and Wright, 2011, "Hogwild!: A Lock-Free Approach to Parallelizing
    Stochastic Gradient Descent", arXiv:1106.5730.
    """

    scale: Literal["sum", "mean"] = "sum"
    damping: bool = True

    name: ClassVar[str] = "hogwild"
    lock_free: ClassVar[bool] = True
    default_window: ClassVar[int] = AUTO_WINDOW
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_one_of(self.name, "scale", self.scale, ("sum", "mean"))
        require_bool(self.name, "damping", self.damping)

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
