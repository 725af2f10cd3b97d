"""Walking over long vectors in pieces that stay in a core's cache.

``center + delta / 5`` written in one line makes a temporary as long as the model and reads memory
twice. The rules go block by block instead: the few scratch values of one block never leave the
cache, so that a rule costs little more than one ``np.add``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparkdl.weights import FloatArray

BLOCK = 65_536
"""Elements per block: 256 KiB of float32, so that a few of them fit a level-2 cache."""


def blocks(size: int, first: int = 0) -> Iterator[slice]:
    """Slices of at most ``BLOCK`` elements that cover ``range(size)`` once.

    Args:
        size: Elements to cover.
        first: Number of the block to begin with; the walk wraps around the end.
    """
    count = -(-size // BLOCK)
    for i in range(count):
        start = ((first + i) % count) * BLOCK
        yield slice(start, min(start + BLOCK, size))


def scratch(size: int) -> FloatArray:
    """A new float32 vector for one block's intermediate values; never shared between threads."""
    return np.empty(min(size, BLOCK), np.float32)


def add_scaled(center: FloatArray, delta: FloatArray, factor: float, out: FloatArray) -> None:
    """``out = center + factor * delta``, all float32 of one shape; ``out`` may be ``center``."""
    if factor == 1.0:
        np.add(center, delta, out=out)
        return
    buffer = scratch(center.size)
    scale = np.float32(factor)
    for part in blocks(center.size):
        step = buffer[: part.stop - part.start]
        np.multiply(delta[part], scale, out=step)
        np.add(center[part], step, out=out[part])
