"""Stale-synchronous parallel: how many commits a worker may be ahead of the slowest is bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sparkdl.config import AUTO_WINDOW
from sparkdl.rules.rule import Commit, Rule
from sparkdl.settings.values import require_one_of, require_whole


@dataclass(frozen=True)
class SSP(Rule):
    """Bounded staleness: a worker waits while it is more than ``staleness`` commits ahead.

    A worker with ``c`` commits gets its reply once the slowest has at least ``c - staleness``, and
    so sees every update of clock ``c - staleness - 1`` and before. A ``staleness`` of 0 is BSP;
    with a negative one nobody waits (ASP). The server copies the center for the reply *after* the
    wait.

    ::

        center += delta / workers      (scale 'mean')
        center += delta                (scale 'sum')

    With ``'mean'`` one round of all workers adds the mean of their changes, so that staleness 0
    gives BSP's weights; the paper itself adds (``'sum'``), with a learning rate that is divided.

    Args:
        staleness: Commits that a worker may be ahead of the slowest.
        scale: ``'mean'`` or ``'sum'``.

    References: Ho et al., 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server" (NIPS); Jiang et al., 2017, "Angel" (its ``staleness`` counts alike).
    """

    staleness: int = 3
    scale: Literal["mean", "sum"] = "mean"

    name: ClassVar[str] = "ssp"
    default_window: ClassVar[int] = AUTO_WINDOW

    def __post_init__(self) -> None:
        require_whole(self.name, "staleness", self.staleness)
        require_one_of(self.name, "scale", self.scale, ("mean", "sum"))

    def share_of(self, commit: Commit) -> float:
        return 1.0 / max(commit.num_workers, 1) if self.scale == "mean" else 1.0

    def may_continue(self, clock: int, slowest_clock: int) -> bool:
        return self.staleness < 0 or clock - slowest_clock <= self.staleness
