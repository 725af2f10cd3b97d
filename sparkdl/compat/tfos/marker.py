"""What feeders put between the elements of a queue."""

from __future__ import annotations


class Marker:
    """No element."""


class EndPartition(Marker):
    """The end of a partition: a batch for inference does not reach beyond it."""
