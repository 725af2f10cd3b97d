"""ADAG: DOWNPOUR normalized by the communication window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparkdl.optimizers.blocks import add_scaled
from sparkdl.rules.rule import Commit, Rule, State
from sparkdl.weights import FloatArray


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

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """``out = center + delta / batches``."""
        add_scaled(center, delta, 1.0 / max(commit.batches, 1), out)
