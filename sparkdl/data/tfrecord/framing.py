"""The frames of TFRecord files and of TensorBoard's event files.

::

    uint64 length | uint32 masked CRC of the length | data | uint32 masked CRC of the data

Little-endian; the CRC is CRC-32C (Castagnoli), masked so that data which hold a CRC of themselves
do not look sound: ``((c >> 15) | (c << 17)) + 0xa282ead8``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import BinaryIO

from sparkdl.errors import DataError

_MASK = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78
_HEAD_BYTES, _FOOT_BYTES = 12, 4
MAX_RECORD_BYTES = 1 << 31


def frame(data: bytes) -> bytes:
    """``data`` as one frame."""
    head = struct.pack("<Q", len(data))
    return b"".join((head, _packed_crc(head), data, _packed_crc(data)))


def read_frames(stream: BinaryIO, name: str = "the file") -> Iterator[bytes]:
    """The data of each frame in order.

    Args:
        stream: Is read from where it stands to its end.
        name: Of the file, for the message.

    Raises:
        DataError: A frame is cut off, or a CRC does not fit.
    """
    number = 0
    while head := stream.read(_HEAD_BYTES):
        if len(head) < _HEAD_BYTES or _packed_crc(head[:8]) != head[8:]:
            raise _broken(name, number, "the head of a frame, with its CRC", f"{len(head)} bytes")
        (length,) = struct.unpack("<Q", head[:8])
        if length > MAX_RECORD_BYTES:
            raise _broken(name, number, f"at most {MAX_RECORD_BYTES} bytes", f"{length}")
        data, foot = stream.read(length), stream.read(_FOOT_BYTES)
        if len(data) < length or len(foot) < _FOOT_BYTES:
            raise _broken(name, number, f"{length} bytes and a CRC", f"{len(data) + len(foot)}")
        if _packed_crc(data) != foot:
            raise _broken(name, number, "data that fit their CRC", "other data")
        yield data
        number += 1


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


def _packed_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _broken(name: str, number: int, expected: str, received: str) -> DataError:
    return DataError(
        f"record {number} of {name} is broken",
        expected=expected,
        received=received,
        hint="was the file cut off while it was written or copied?",
    )
