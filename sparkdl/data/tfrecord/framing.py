"""The frames of TFRecord files and of TensorBoard's event files.

::

    uint64 length | uint32 masked CRC of the length | data | uint32 masked CRC of the data

Little-endian; the CRC is CRC-32C (Castagnoli), masked so that data which hold a CRC of themselves
do not look sound: ``((c >> 15) | (c << 17)) + 0xa282ead8``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError

_MASK = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78
HEAD_BYTES, FOOT_BYTES = 12, 4
MAX_RECORD_BYTES = 1 << 31
"""A protocol buffer is shorter than that."""


def frame(data: bytes) -> bytes:
    """``data`` as one frame."""
    head = struct.pack("<Q", len(data))
    return b"".join((head, _packed_crc(head), data, _packed_crc(data)))


def read_frames(stream: BinaryIO, name: str = "the file") -> Iterator[bytes]:
    """The data of each frame in order.

    Raises:
        DataError: A frame is cut off, or a CRC does not fit.
    """
    at = RecordPlace(name)
    while head := stream.read(HEAD_BYTES):
        if len(head) < HEAD_BYTES or _packed_crc(head[:8]) != head[8:]:
            raise broken(at, "the head of a frame, with its CRC", f"{len(head)} bytes")
        (length,) = struct.unpack("<Q", head[:8])
        if length >= MAX_RECORD_BYTES:
            raise broken(at, f"fewer than {MAX_RECORD_BYTES} bytes", f"{length}")
        data, foot = stream.read(length), stream.read(FOOT_BYTES)
        if len(data) < length or len(foot) < FOOT_BYTES:
            raise broken(at, f"{length} bytes and a CRC", f"{len(data) + len(foot)}")
        if _packed_crc(data) != foot:
            raise broken(at, "data that fit their CRC", "other data")
        yield data
        at = RecordPlace(name, at.record + 1, at.offset + HEAD_BYTES + length + FOOT_BYTES)


def crc32c(data: bytes) -> int:
    """CRC-32C of ``data``, by the package google-crc32c where it is installed.

    >>> hex(crc32c(b'123456789'))
    '0xe3069283'
    """
    return _implementation()(data)


@cache
def _implementation() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError:
        return crc32c_by_table
    return lambda data: int(google_crc32c.value(data))


def crc32c_by_table(data: bytes) -> int:
    """CRC-32C of ``data`` in plain Python, a byte at a time."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        return value

    return tuple(entry(byte) for byte in range(256))


@cache
def slicing_tables() -> npt.NDArray[np.uint32]:
    """Row ``k``: what a byte adds to the CRC if ``k`` bytes follow it; shape (8, 256)."""
    rows = [np.array(_table(), np.uint32)]
    for _ in range(7):
        rows.append(rows[0][rows[-1] & 0xFF] ^ rows[-1] >> 8)
    return np.stack(rows)


def _packed_crc(data: bytes) -> bytes:
    return struct.pack("<I", masked(crc32c(data)))


def varint(value: int) -> bytes:
    """A number of at least 0 in groups of seven bits, the lowest first."""
    text = bytearray()
    while value >= 0x80:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*text, value])


def masked(crc: int) -> int:
    """The CRC as it stands in a file."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


@dataclass(frozen=True)
class RecordPlace:
    """The place of a record: its file, its number in it from 0, and the first byte of its frame."""

    name: str
    record: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"record {self.record} of {self.name}, at byte {self.offset}"


def broken(place: RecordPlace, expected: str, received: str, hint: str = "") -> DataError:
    """The errors about a frame or a message that is not as it should be."""
    return DataError(
        f"{place}: broken", expected=expected, received=received,
        hint=hint or "was the file cut off while it was written or copied?",
    )  # fmt: skip
