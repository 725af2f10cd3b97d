"""Which rank owns a row: ranks own ranges of the hashes of ids, one after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparkdl.tables.hashing import Hashes, Ids, mix64

SEGMENTS = 64
"""Segments of each rank. A rank's rows, sorted by hash, are its segments one after another."""


def segments(hashes: Hashes, ranks: int) -> npt.NDArray[np.int64]:
    """The segment of each hash, below ``64 * ranks``; a larger hash has no smaller segment."""
    return (((hashes >> np.uint64(32)) * np.uint64(SEGMENTS * ranks)) >> np.uint64(32)).astype(
        np.int64
    )


def owner(ids: Ids, ranks: int) -> npt.NDArray[np.int64]:
    """The rank that owns each id, below ``ranks``."""
    return segments(mix64(ids), ranks) // SEGMENTS


def hash_range(rank: int, ranks: int) -> tuple[int, int]:
    """The first hash that ``rank`` owns, and the one after its last: up to 2^64."""
    return tuple(-(-(r << 32) // ranks) << 32 for r in (rank, rank + 1))  # type: ignore[return-value]
