"""A vector as signs, one bit each, with a mean size for each of its pieces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sparkdl.optimizers.blocks import BLOCK, blocks, scratch
from sparkdl.weights import FloatArray

Bytes = npt.NDArray[np.uint8]

# The eight signs that a byte stands for: 8 KiB, which stay in a core's first cache.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
_SIGNS = np.where(_BITS, np.float32(-1.0), np.float32(1.0))


class SignCode:
    """``C(u) = sign(u) · mean|u|``, the mean over the active coordinates of a piece.

    The methods work on a range of the vector that begins and ends where pieces do. Not thread-safe.

    Args:
        size: Of the vector.
        starts: Where its pieces begin: increasing, from 0.
        active: Coordinates that count; the others must be 0 when encoded, and decode to 0.
    """

    def __init__(
        self, size: int, starts: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]
    ) -> None:
        self._starts = starts
        self._ends = np.append(starts[1:], size)
        self._counts = (
            np.add.reduceat(active, starts, dtype=np.int64) if size else np.zeros(0, np.int64)
        )
        self._mask = None if active.all() else active.astype(np.float32)
        self._scratch = scratch(size)

    def pieces(self, start: int, stop: int) -> int:
        """Pieces in a range: how many sizes belong to it."""
        first, last = np.searchsorted(self._starts, (start, stop))
        return int(last - first)

    def silence(self, values: FloatArray, start: int = 0) -> None:
        """Sets the coordinates of a range that are not active to 0."""
        if self._mask is not None:
            np.multiply(values, self._mask[start : start + values.size], out=values)

    def encode(self, values: FloatArray, start: int = 0) -> tuple[Bytes, FloatArray]:
        """The signs of a range (1 is below zero), packed, and its pieces' mean sizes."""
        sizes = np.zeros(self.pieces(start, start + values.size), np.float32)
        for number, place in self._parts(start, values.size):
            part = self._scratch[: place.stop - place.start]
            np.abs(values[place], out=part)
            sizes[number] += np.add.reduce(part)
        first = int(np.searchsorted(self._starts, start))
        sizes /= np.maximum(self._counts[first : first + sizes.size], 1)
        return np.packbits(np.signbit(values)), sizes

    def keep_rest(self, values: FloatArray, sizes: FloatArray, start: int, out: FloatArray) -> None:
        """``out = values − decoded``, what the code of ``values`` with these sizes loses."""
        for number, place in self._parts(start, values.size):
            part = self._scratch[: place.stop - place.start]
            np.copysign(sizes[number], values[place], out=part)
            np.subtract(values[place], part, out=out[place])
        self.silence(out, start)

    def decode(
        self, bits: Bytes, sizes: FloatArray, start: int, out: FloatArray, skip: int = 0
    ) -> None:
        """Writes the values of a range into ``out``; ``skip`` of the bits are before it."""
        position = skip
        for part in blocks(out.size):
            count = part.stop - part.start
            first, last = position // 8, -(-(position + count) // 8)
            table = np.take(_SIGNS, bits[first:last], axis=0, mode="clip").reshape(-1)
            np.copyto(out[part], table[position - 8 * first :][:count])
            position += count
        for number, place in self._parts(start, out.size):
            np.multiply(out[place], sizes[number], out=out[place])
        self.silence(out, start)

    def _parts(self, start: int, size: int) -> Iterator[tuple[int, slice]]:
        """Each piece's number in the range, with those of its parts that fit a cache, as slices."""
        first = int(np.searchsorted(self._starts, start))
        for number in range(self.pieces(start, start + size)):
            low = int(self._starts[first + number]) - start
            high = int(self._ends[first + number]) - start
            for at in range(low, high, BLOCK):
                yield number, slice(at, min(at + BLOCK, high))
