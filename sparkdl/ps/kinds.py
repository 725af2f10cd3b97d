"""The frames of a parameter store: what workers ask it, and how it answers."""

from __future__ import annotations

import enum

from sparkdl.codecs import Compression
from sparkdl.transport.frames import Limits, kinds_of
from sparkdl.weights import Layout

WITHOUT_GRADIENT = "without_gradient"
"""In the meta of a commit to a round, and of its reply: numbers of the variables that have none."""


class StoreKind(enum.IntEnum):
    """The requests that a store answers, and its own reply."""

    PULL = 32
    PUSH = 33
    PUSH_PULL = 34
    SNAPSHOT = 35  # weights become the center (gradient rules)
    STATE_PUT = 36  # one chunk of weights + optimizer state for a joiner
    STATE_GET = 37
    ADD_UP = 38  # a few numbers, in the meta; answered with their sums over the ranks of the round
    SLICES_PUT = 39  # one chunk of a commit with slices that is larger than a connection's buffer
    SLICES_GET = 40  # one chunk of such a round's result
    WEIGHTS = 65  # a reply


COMMITS = frozenset({StoreKind.PUSH, StoreKind.PUSH_PULL})


def limits_of(layout: Layout, compression: Compression | None = None) -> Limits:
    """The bodies that travel between a worker and a store of this layout."""
    encoded = 0 if compression is None else compression.max_bytes
    return Limits(layout.size_bytes, encoded, kinds=kinds_of(StoreKind))
