"""The record that each rank sends to all others at the start of an operation.

A record is ``SAME | WEIGHT | payload``: the description of the operation, which must be equal on
all ranks, byte for byte; this rank's weight; and its data, if they are few.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import KINDS, OPS, Array
from sparkdl.errors import ProtocolError

SAME = struct.Struct("<BBBB12sQq8q")
WEIGHT = struct.Struct("<d")
HEADER_BYTES = SAME.size + WEIGHT.size
LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class Record:
    """One rank's description of an operation, and its data if they are few."""

    kind: str
    op: str
    inline: bool
    dtype: str
    size_bytes: int
    root: int
    shape: tuple[int, ...]
    payload: bytes

    @classmethod
    def of(cls, text: bytes) -> Record:
        try:
            kind, op, inline, ndim, name, size_bytes, root, *shape = SAME.unpack_from(text)
            dtype = name.rstrip(b"\0").decode("ascii")
            record = cls(
                KINDS[kind], OPS[op], bool(inline), dtype, size_bytes, root, tuple(shape[:ndim]),
                text[HEADER_BYTES:],
            )  # fmt: skip
            whole = math.prod(record.shape) * np.dtype(dtype_of(dtype)).itemsize == size_bytes
        except (struct.error, ValueError, IndexError, TypeError) as error:
            raise ProtocolError(
                "cannot read a rank's record", expected="a record of this version of sparkdl",
                received=repr(text[:64]),
            ) from error  # fmt: skip
        if not whole or (record.payload and len(record.payload) != size_bytes):
            raise ProtocolError(
                "a rank's record contradicts itself",
                expected=f"{size_bytes} bytes of {dtype} in shape {record.shape}",
                received=f"{len(record.payload)} bytes",
            )
        return record

    def words(self) -> str:
        """The operation in words."""
        return f"{self.kind}(op={self.op}, {self.dtype}, shape {self.shape}, root={self.root})"

    def array(self) -> Array:
        """The data that came with the record."""
        return self.shaped(np.frombuffer(self.payload, np.uint8).copy())

    def shaped(self, data: npt.NDArray[np.uint8]) -> Array:
        """``data`` as the array described."""
        if data.ctypes.data % 8:
            data = data.copy()  # after data of odd length it is not aligned
        result: Array = data.view(dtype_of(self.dtype)).reshape(self.shape)
        return result


def dtype_of(name: str) -> np.dtype[np.generic]:
    """The dtype of this name; ``bfloat16`` is known once its package is imported."""
    if name == "bfloat16":
        import ml_dtypes

        half: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
        return half
    return np.dtype(name)


def payload_of(text: bytes, dtype: np.dtype[np.generic], size: int) -> Array:
    """The data in a record, of which the header has been checked."""
    if len(text) != HEADER_BYTES + size * dtype.itemsize:
        raise ProtocolError(
            "a rank's record is not whole", expected=f"{size} elements of {dtype}",
            received=f"{len(text) - HEADER_BYTES} bytes",
        )  # fmt: skip
    return np.frombuffer(text, np.uint8, offset=HEADER_BYTES).view(dtype)


def pack_records(records: Sequence[bytes]) -> bytes:
    return b"".join(LENGTH.pack(len(r)) + r for r in records)


def unpack_records(text: bytes) -> list[bytes]:
    records, at = [], 0
    while at < len(text):
        if at + LENGTH.size > len(text):
            raise ProtocolError(
                "a record ends too early", expected=f"a length of {LENGTH.size} bytes at byte {at}",
                received=f"{len(text)} bytes in all",
            )  # fmt: skip
        (length,) = LENGTH.unpack_from(text, at)
        at += LENGTH.size
        records.append(text[at : at + length])
        at += length
    return records
