"""How often workers exchange."""

from __future__ import annotations

from enum import StrEnum


class Frequency(StrEnum):
    """A frequency; each is also its name."""

    EPOCH = "epoch"
    BATCH = "batch"
