"""Gradients that are rows of a variable with their indices, and how they travel.

Keras on TensorFlow gives its optimizer the gradient of an embedding as one row for each id of the
batch. An id that comes twice has two rows, and most optimizers do something else with two rows
than with their sum. So the rows of all workers are put one after the other, and never summed.

The bytes of several variables' slices behind a head, which is anything else that travels::

    | head bytes, variables: int64 | place, rows, width of each: int64 | head | indices: int32,
    rows: float32, of each variable |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ProtocolError

ByteArray = npt.NDArray[np.uint8]
_NUMBER = np.dtype("<i8")


@dataclass
class Slices:
    """The gradient of one variable.

    Args:
        place: Number of the variable in the layout.
        indices: Which row of the variable each row is of; int32, of shape ``(n,)``.
        rows: The rows, flat: float32 of shape ``(n, width)``.
    """

    place: int
    indices: npt.NDArray[np.int32]
    rows: npt.NDArray[np.float32]

    @classmethod
    def none(cls, place: int, width: int) -> Slices:
        """Those of a worker without a batch."""
        return cls(place, np.empty(0, np.int32), np.empty((0, width), np.float32))

    @property
    def size_bytes(self) -> int:
        """Bytes of indices and rows."""
        return self.indices.nbytes + self.rows.nbytes


def join_slices(parts: Sequence[tuple[float, Sequence[Slices]]]) -> list[Slices]:
    """The slices of all workers, each variable's in the order of the workers.

    Args:
        parts: Weight and slices of each worker. With weights ``w_i`` worker ``i``'s rows are
            scaled by ``w_i / Σ w``, so that they are rows of the gradient of the weighted mean. A
            worker of weight 0 has none.
    """
    parts = [(weight, slices) for weight, slices in parts if weight]
    total = float(sum(weight for weight, _ in parts))
    if len(parts) < 2:
        return list(parts[0][1]) if parts else []
    joined = []
    for each in zip(*(slices for _, slices in parts), strict=True):
        rows = np.concatenate([s.rows for s in each])
        start = 0
        for (weight, _), own in zip(parts, each, strict=True):
            rows[start : start + len(own.rows)] *= np.float32(weight / total)
            start += len(own.rows)
        joined.append(Slices(each[0].place, np.concatenate([s.indices for s in each]), rows))
    return joined


def head_offset(count: int) -> int:
    """The place at which the head begins behind the slices of ``count`` variables."""
    return _NUMBER.itemsize * (2 + 3 * count)


def packed_bytes(head_bytes: int, slices: Sequence[Slices]) -> int:
    """Bytes that :func:`pack_around` fills."""
    return _rows_offset(head_bytes, len(slices)) + sum(s.size_bytes for s in slices)


def pack_around(out: ByteArray, head_bytes: int, slices: Sequence[Slices]) -> None:
    """Writes all but the head, which is (or will be) at :func:`head_offset`, into ``out``."""
    numbers = [head_bytes, len(slices)]
    for s in slices:
        numbers += [s.place, *s.rows.shape]
    out[: head_offset(len(slices))] = np.array(numbers, _NUMBER).view(np.uint8)
    start = _rows_offset(head_bytes, len(slices))
    for s in slices:
        for array in (s.indices, s.rows):
            out[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            start += array.nbytes


def pack(head: ByteArray, slices: Sequence[Slices]) -> ByteArray:
    """Head and slices as bytes, newly allocated."""
    out = np.empty(packed_bytes(head.size, slices), np.uint8)
    start = head_offset(len(slices))
    out[start : start + head.size] = head
    pack_around(out, head.size, slices)
    return out


def unpack(data: ByteArray) -> tuple[ByteArray, list[Slices]]:
    """The counterpart of :func:`pack`: views of ``data``, whose address is a multiple of 4.

    Raises:
        ProtocolError: These bytes are no slices.
    """
    if data.size < head_offset(0):
        raise _malformed(f"at least {head_offset(0)} bytes", f"{data.size} bytes")
    head_bytes, count = (int(n) for n in data[: head_offset(0)].view(_NUMBER))
    start = head_offset(max(count, 0))
    if min(head_bytes, count) < 0 or start + head_bytes > data.size:
        raise _malformed("sizes within the frame", f"a head of {head_bytes} bytes, {count} parts")
    head = data[start : start + head_bytes]
    numbers = data[head_offset(0) : start].view(_NUMBER).reshape(-1, 3).tolist()
    needed = _rows_offset(head_bytes, count)
    found = []
    for place, rows, width in numbers:
        if place < 0 or rows < 0 or width < 0:
            raise _malformed("numbers of at least 0", f"{rows} rows of {width} for part {place}")
        middle, end = needed + 4 * rows, needed + 4 * rows * (1 + width)
        if end > data.size:
            raise _malformed(f"{end} bytes or more", f"{data.size} bytes")
        indices = data[needed:middle].view("<i4")
        found.append(Slices(place, indices, data[middle:end].view("<f4").reshape(rows, width)))
        needed = end
    if needed != data.size:
        raise _malformed(f"{needed} bytes", f"{data.size} bytes")
    return head, found


def _rows_offset(head_bytes: int, count: int) -> int:
    return head_offset(count) + -(-head_bytes // 4) * 4


def _malformed(expected: str, received: str) -> ProtocolError:
    return ProtocolError(
        "these bytes are no slices of gradients", expected=expected, received=received
    )
