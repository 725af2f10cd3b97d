"""The hashes of ids: ranks own ranges of them, one after another, and files have their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sparkdl.tables.hashing import Hashes, Ids, mix64
from sparkdl.tables.index import Slots

_SORTED_ROWS = 1 << 18
"""Rows that are sorted in one go."""
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


def by_owner(ids: Ids, ranks: int) -> tuple[npt.NDArray[np.intp], list[slice]]:
    """The places of ids, owner by owner, and where those of each owner are among them."""
    if ranks == 1:
        return np.arange(len(ids)), [slice(0, len(ids))]
    owners = owner(ids, ranks)
    order = np.argsort(owners, kind="stable")
    places = np.searchsorted(owners[order], np.arange(ranks + 1)).tolist()
    return order, [slice(a, b) for a, b in itertools.pairwise(places)]


def hash_range(rank: int, ranks: int) -> tuple[int, int]:
    """The first hash that ``rank`` owns, and the one after its last: up to 2^64."""
    return tuple(-(-(r << 32) // ranks) << 32 for r in (rank, rank + 1))  # type: ignore[return-value]


def in_order(slots: Slots, hashes: Hashes, rows: int) -> Iterator[Slots]:
    """Places of rows in the order of the hashes of their ids, in blocks of ``rows``.

    Sorted is a piece at a time, so that the first block is there soon, and whoever writes a block
    does so while the next piece is sorted.
    """
    coarse = np.argsort((hashes >> np.uint64(48)).astype(np.uint16), kind="stable")  # by radix
    slots, hashes = slots[coarse], hashes[coarse]
    start, rest = 0, slots[:0]
    while start < len(slots):
        end = min(start + _SORTED_ROWS, len(slots))
        if end < len(slots):  # up to where the upper bits of the hashes change
            end += int(
                np.searchsorted(
                    hashes[end:] >> np.uint64(48), hashes[end - 1] >> np.uint64(48), "right"
                )
            )
        piece = np.concatenate([rest, slots[start:end][np.argsort(hashes[start:end])]])
        whole = len(piece) if end == len(slots) else len(piece) // rows * rows
        for first in range(0, whole, rows):
            yield piece[first : first + rows]
        start, rest = end, piece[whole:]
