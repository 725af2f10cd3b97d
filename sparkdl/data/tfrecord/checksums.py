"""CRC-32C of many spans of bytes in lockstep: the loop of machines without numba."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from sparkdl.data.tfrecord.framing import slicing_tables

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


def crcs_in_lockstep(
    buffer: Bytes, starts: Positions, lengths: Positions
) -> npt.NDArray[np.uint32]:
    """Each span is cut into pieces of one size, the first filled up with zeros in front.

    Zeros do not change a CRC that begins with 0; that it begins with all ones is the same as
    turning the bits of the span's first four bytes.
    """
    if not len(starts):
        return np.empty(0, np.uint32)
    size = int(np.clip(1 << int(np.mean(lengths)).bit_length(), 16, 1024))
    while size > len(buffer):
        size //= 2
    windows = np.ndarray((len(buffer) - size + 1, size), np.uint8, buffer, 0, (1, 1))
    crcs = np.zeros(len(starts), np.uint32)
    pieces = np.maximum(-(-lengths // size), 1)
    for number in range(int(pieces.max())):  # a long span has many: then there are few spans
        rows = np.flatnonzero(pieces > number)
        first = lengths[rows] - (pieces[rows] - number) * size  # below 0 where it is filled up
        at = starts[rows] + first
        data = windows[np.maximum(at, 0)]
        for row in np.flatnonzero(at < 0):
            data[row, -at[row] :] = buffer[: size + at[row]]
        if number == 0:
            data[np.arange(size) < -first[:, None]] = 0
        if number <= 1:  # the first four bytes may begin in the first piece and end in the second
            for byte in range(4):
                inside = np.flatnonzero((first <= byte) & (byte - first < size))
                data[inside, byte - first[inside]] ^= 0xFF
        crcs[rows] = _shifted(crcs[rows], size) ^ _crcs_of_rows(data)
    crcs ^= np.uint32(0xFFFFFFFF)
    for row in np.flatnonzero(lengths < 4):
        crcs[row] = _short_crc(buffer[starts[row] : starts[row] + lengths[row]])
    return crcs


def _crcs_of_rows(data: Bytes) -> npt.NDArray[np.uint32]:
    tables = slicing_tables()
    words = np.ascontiguousarray(data).view("<u8")
    crcs = np.zeros(len(data), np.uint64)
    for column in range(words.shape[1]):
        word = words[:, column] ^ crcs
        new = tables[0][word >> 56]
        for i in range(7):
            new ^= tables[7 - i][(word >> (8 * i)) & 0xFF]
        crcs = new.astype(np.uint64)
    return crcs.astype(np.uint32)


@cache
def _shift_tables(size: int) -> npt.NDArray[np.uint32]:
    """The effect of ``size`` zero bytes on each byte of a CRC; shape (4, 256)."""
    crcs = (np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]).ravel()
    table = slicing_tables()[0]
    for _ in range(size):
        crcs = table[crcs & 0xFF] ^ crcs >> 8
    return crcs.reshape(4, 256)


def _shifted(crcs: npt.NDArray[np.uint32], size: int) -> npt.NDArray[np.uint32]:
    tables = _shift_tables(size)
    found: npt.NDArray[np.uint32] = tables[3][crcs >> 24]
    for i in range(3):
        found ^= tables[i][crcs >> (8 * i) & 0xFF]
    return found


def _short_crc(data: Bytes) -> int:
    table, crc = slicing_tables()[0], 0xFFFFFFFF
    for byte in data.tolist():
        crc = int(table[(crc ^ byte) & 0xFF]) ^ crc >> 8
    return crc ^ 0xFFFFFFFF
