"""Two bytes per element: fp16 and bf16; and four, for no compression at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sparkdl.codecs.codec import (
    CHUNK,
    ByteArray,
    Codec,
    Generator,
    Payload,
    as_bytes,
    check_size,
    check_vector,
    chunks,
)
from sparkdl.weights import FloatArray

_FP16_MAX = np.float32(65504.0)


@dataclass(frozen=True)
class Raw(Codec):
    """The float32 values as they are, little-endian: 4 bytes per element, nothing lost."""

    name: ClassVar[str] = "none"
    lossy: ClassVar[bool] = False
    sum_dtype: ClassVar[str | None] = "float32"

    def max_size(self, size: int) -> int:
        """4 bytes per element."""
        return 4 * size

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """A copy of the bytes of ``array``."""
        check_vector(array)
        return array.astype("<f4").view(np.uint8)

    def decode(self, payload: Payload, out: FloatArray) -> None:
        """Copies the values into ``out``."""
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(out.size))
        np.copyto(out, np.ascontiguousarray(data).view("<f4"))


@dataclass(frozen=True)
class FP16(Codec):
    """IEEE half precision: 2 bytes per element, relative error at most 2⁻¹¹ from 6e-5 to 65504.

    Larger finite values become ±65504; smaller ones lose precision gradually, with an absolute
    error of at most 3e-8. NaN and infinity stay what they are: where the loss is scaled, they tell
    the optimizer to scale less.
    """

    name: ClassVar[str] = "fp16"
    feedback: ClassVar[bool] = False
    sum_dtype: ClassVar[str | None] = "float16"

    def max_size(self, size: int) -> int:
        """2 bytes per element."""
        return 2 * size

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Rounds to nearest."""
        check_vector(array)
        return to_float16(array, _FP16_MAX).view(np.uint8)

    def decode(self, payload: Payload, out: FloatArray) -> None:
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(out.size))
        np.copyto(out, np.ascontiguousarray(data).view("<f2"))


@dataclass(frozen=True)
class BF16(Codec):
    """bfloat16: 2 bytes per element, float32's range, relative error at most 2⁻⁸.

    NaN stays NaN; a finite value within 2⁻⁹ of float32's largest rounds to infinity.
    """

    name: ClassVar[str] = "bf16"
    feedback: ClassVar[bool] = False
    sum_dtype: ClassVar[str | None] = "bfloat16"

    def max_size(self, size: int) -> int:
        """2 bytes per element."""
        return 2 * size

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Rounds to nearest, ties to even."""
        check_vector(array)
        halves = np.empty(array.size, "<u2")
        first = np.empty(min(array.size, 65_536), np.uint32)
        second = np.empty_like(first)
        bits = array.view(np.uint32)
        for part in chunks(array.size):
            n = part.stop - part.start
            rounded, odd = first[:n], second[:n]
            # Adding 0x7fff, plus 1 if the last bit kept is odd, carries into it just when it must.
            np.right_shift(bits[part], np.uint32(16), out=odd)
            np.bitwise_and(odd, np.uint32(1), out=odd)
            np.add(bits[part], np.uint32(0x7FFF), out=rounded)
            np.add(rounded, odd, out=rounded)
            np.right_shift(rounded, np.uint32(16), out=rounded)
            nan = np.isnan(array[part])
            if nan.any():  # the carry would turn some of them into infinity or zero
                rounded[nan] = 0x7FC0
            np.copyto(halves[part], rounded, casting="unsafe")
        return halves.view(np.uint8)

    def decode(self, payload: Payload, out: FloatArray) -> None:
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(out.size))
        np.left_shift(
            np.ascontiguousarray(data).view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32
        )


def to_float16(array: npt.NDArray[Any], most: np.float32) -> npt.NDArray[np.float16]:
    """A copy of float32 values, finite ones cut off at ``±most``; infinities stay."""
    flat = array.reshape(-1)
    halves = np.empty(flat.size, "<f2")
    buffer = np.empty(min(flat.size, CHUNK), np.float32)
    for part in chunks(flat.size):
        clipped = buffer[: part.stop - part.start]
        np.clip(flat[part], -most, most, out=clipped)
        halves[part] = clipped
        infinite = np.isinf(flat[part])
        if infinite.any():
            halves[part][infinite] = flat[part][infinite]
    return halves.reshape(array.shape)


def to_summable(array: npt.NDArray[Any], dtype: str, summed: int = 1) -> npt.NDArray[Any]:
    """A copy of float32 values as a codec's ``sum_dtype``, finite where they are.

    An infinity stays one: where the loss is scaled, it tells the optimizer to scale less.

    Args:
        array: The values.
        dtype: ``'float16'`` or ``'bfloat16'``.
        summed: Arrays that will be added up: values of float16 are cut off below 65504 over that,
            so that their sum is no infinity either, in whatever order. A mean needs no more than 1.

    >>> to_summable(np.float32([1, -7e4, np.nan, np.inf]), 'float16').tolist()
    [1.0, -65504.0, nan, inf]
    """
    if dtype != "float16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    # Each addition may round up by 2^-11, and so may the bound itself become a float16.
    bound = float(_FP16_MAX) / summed / (1 + 2**-11) ** (summed - 1)
    most = np.float16(bound)
    if most > bound:
        most = np.nextafter(most, np.float16(0))
    return to_float16(array, np.float32(most))
