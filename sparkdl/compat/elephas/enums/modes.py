"""How workers train together."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """A mode; each is also its name."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"
    HOGWILD = "hogwild"
