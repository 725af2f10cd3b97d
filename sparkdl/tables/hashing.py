"""Hashes of ids and of texts, each for a whole array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError

Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SPARK_SEED = 42
"""The seed of Spark's ``xxhash64``."""
_BLOCK = 1 << 15

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(p)
    for p in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)


def mix64(ids: Ids | Hashes) -> Hashes:
    """Spreads 64-bit ids over all 64-bit numbers; different ids have different hashes.

    The last step of SplitMix64 (Steele, Lea, Flood, 2014).
    """
    h = ids.astype(np.uint64, order="C")
    flat = h.reshape(-1)
    for start in range(0, flat.size, _BLOCK):  # a block fits the cache
        part = flat[start : start + _BLOCK]
        part ^= part >> np.uint64(30)
        part *= np.uint64(0xBF58476D1CE4E5B9)
        part ^= part >> np.uint64(27)
        part *= np.uint64(0x94D049BB133111EB)
        part ^= part >> np.uint64(31)
    return h


def ids_of_texts(texts: Sequence[str] | npt.NDArray[np.str_]) -> Ids:
    """The id of each text: what Spark's ``xxhash64`` gives for it, negative ones too."""
    encoded = [str(text).encode() for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    found = np.empty(len(encoded), np.uint64)
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length)
        joined = b"".join(encoded[place] for place in places)
        found[places] = _xxhash64(np.frombuffer(joined, np.uint8).reshape(len(places), length))
    return found.view(np.int64)


def _xxhash64(rows: npt.NDArray[np.uint8]) -> Hashes:
    count, length = rows.shape
    seed: Hashes = np.full(count, SPARK_SEED, np.uint64)
    h: Hashes
    done = length - length % 32
    if done:
        words = np.ascontiguousarray(rows[:, :done]).view("<u8")
        lanes = [seed + _P1 + _P2, seed + _P2, seed.copy(), seed - _P1]
        for place in range(done // 8):
            lanes[place % 4] = _round(lanes[place % 4], words[:, place])
        h = _rotated(lanes[0], 1) + _rotated(lanes[1], 7)
        h = h + _rotated(lanes[2], 12) + _rotated(lanes[3], 18)
        for lane in lanes:
            h = (h ^ _round(np.zeros_like(lane), lane)) * _P1 + _P4
    else:
        h = seed + _P5
    h = h + np.uint64(length)
    for start in range(done, length - 7, 8):
        word = np.ascontiguousarray(rows[:, start : start + 8]).view("<u8")[:, 0]
        h = _rotated(h ^ _round(np.zeros_like(word), word), 27) * _P1 + _P4
    done = length - length % 8
    if length - done >= 4:
        half = np.ascontiguousarray(rows[:, done : done + 4]).view("<u4")[:, 0].astype(np.uint64)
        h = _rotated(h ^ (half * _P1), 23) * _P2 + _P3
        done += 4
    for place in range(done, length):
        h = _rotated(h ^ (rows[:, place].astype(np.uint64) * _P5), 11) * _P1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


def _rotated(h: Hashes, bits: int) -> Hashes:
    return (h << np.uint64(bits)) | (h >> np.uint64(64 - bits))


def _round(lane: Hashes, word: Hashes) -> Hashes:
    return _rotated(lane + word * _P2, 31) * _P1


def signed(ids: npt.ArrayLike) -> Ids:
    """Ids of shape (n,) as int64; raises DataError where one would become another number."""
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(
            "these are no ids of a table", expected="integers of shape (n,)",
            received=f"{given.dtype} of shape {given.shape}",
        )  # fmt: skip
    if given.dtype == np.uint64 and len(too_large := given[given > np.iinfo(np.int64).max]):
        raise DataError(
            "an id is too large for a table, whose ids are integers of 64 bits with a sign",
            expected="ids of at most 2**63 - 1", received=str(too_large[0]),
            hint="ids.view(np.int64), if the model gets them so in training, too",
        )  # fmt: skip
    return given.astype(np.int64, copy=False)
