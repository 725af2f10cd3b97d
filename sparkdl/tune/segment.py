"""``Segment``: a stretch of epochs of one trial, between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Epochs ``begin`` to ``end`` of a trial; pausing a trial is not to start its next segment.

    Args:
        trial: Number of the trial, from 0.
        begin: Epochs that the trial has done before.
        end: Epochs that it has done afterwards.
        parent: The trial whose checkpoint at ``begin`` the segment starts from; None for its own.
    """

    trial: int
    begin: int
    end: int
    parent: int | None = None
