"""Fewer bits per element: float16, bfloat16, int8 and 4-bit blocks, dithering (QSGD), one bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
    malformed,
)
from sparkdl.settings.values import one_word_of, option, require, require_whole
from sparkdl.weights import FloatArray

Rounding = Literal["stochastic", "nearest"]


class _Quantized(Codec):
    """Base of the codecs that make one scale and ``block`` codes of each block of elements.

    On the wire: all scales (float32, one per block: the size of one level), then all codes, block
    after block. A code is the level plus ``levels``, in 2, 4 or 8 bits. A block is cut into as many
    equal parts as a byte has codes; a byte holds one of each part. The last block is filled up with
    zeros.
    """

    block: int
    levels: int
    norm: Literal["max", "l2"]

    @property
    def _stochastic(self) -> bool:
        return True

    @property
    def _bits(self) -> int:
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def _count(self, size: int) -> int:
        return -(-size // self.block)

    @property
    def _width(self) -> int:
        """Bytes of one block's codes."""
        return self.block * self._bits // 8

    def max_size(self, size: int) -> int:
        """Exactly what ``encode`` makes: one scale per block and its codes, the last one filled."""
        return self._count(size) * (4 + self._width)

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        check_vector(array)
        count = self._count(array.size)
        payload = np.empty(self.max_size(array.size), np.uint8)
        scales = payload[: 4 * count].view("<f4")
        codes = payload[4 * count :].reshape(count, self._width)
        rows = max(CHUNK // self.block, 1)
        shape = (min(rows, count), self.block)
        work, dither = np.empty(shape, np.float32), None
        if self._stochastic and count:
            # All chunks use the same uniform draws, each from another random place on: every
            # element still gets a uniform draw, at a tenth of the cost.
            rng = np.random.default_rng() if rng is None else rng
            dither = rng.random(2 * work.size, dtype=np.float32)
            dither += np.float32(self.levels)
        whole = array.size // self.block
        for start in range(0, whole, rows):
            stop = min(start + rows, whole)
            values = array[start * self.block : stop * self.block].reshape(-1, self.block)
            noise = self._noise(dither, values, rng)
            self._quantize(values, noise, work, scales[start:stop], codes[start:stop])
        if whole < count:
            rest = np.zeros((1, self.block), np.float32)
            rest[0, : array.size - whole * self.block] = array[whole * self.block :]
            noise = self._noise(dither, rest, rng)
            self._quantize(rest, noise, work, scales[whole:], codes[whole:])
        return payload

    @staticmethod
    def _noise(
        dither: FloatArray | None, values: FloatArray, rng: Generator | None
    ) -> FloatArray | None:
        if dither is None or rng is None:
            return None
        first = int(rng.integers(dither.size - values.size + 1))
        return dither[first : first + values.size].reshape(values.shape)

    def _quantize(
        self,
        values: FloatArray,
        noise: FloatArray | None,
        work: FloatArray,
        scales: npt.NDArray[np.float32],
        codes: ByteArray,
    ) -> None:
        levels = work[: values.shape[0]]
        if self.norm == "max":
            np.abs(values, out=levels)
            largest = np.maximum.reduce(levels, axis=1)
        else:
            np.multiply(values, values, out=levels)
            largest = np.sqrt(np.add.reduce(levels, axis=1))
        np.divide(largest, np.float32(self.levels), out=scales)
        # For a scale below the normal range 1 / scale overflows; such a block is sent as zeros. A
        # NaN or infinity in a block makes its scale NaN, so that all of it decodes to NaN.
        scales[~np.isfinite(scales)] = np.nan
        scales[scales < np.finfo(np.float32).tiny] = 0.0
        inverse = np.zeros_like(scales)
        np.divide(np.float32(1.0), scales, out=inverse, where=scales > 0)
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(values, inverse[:, None], out=levels)
        if np.isnan(scales).any():
            np.nan_to_num(levels, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        # With the addition all values are at least 0, up to rounding: the cast takes the floor.
        np.add(levels, np.float32(self.levels + 0.5) if noise is None else noise, out=levels)
        whole = levels.astype(np.uint8)
        np.minimum(whole, np.uint8(2 * self.levels), out=whole)
        if self._bits == 8:
            codes[...] = whole
            return
        parts = np.split(whole, 8 // self._bits, axis=1)
        np.copyto(codes, parts[0])
        for i, part in enumerate(parts[1:], start=1):
            np.left_shift(part, np.uint8(i * self._bits), out=part)
            np.bitwise_or(codes, part, out=codes)

    def decode(self, payload: Payload, out: FloatArray) -> None:
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(out.size))
        count = self._count(out.size)
        scales = np.ascontiguousarray(data[: 4 * count]).view("<f4")
        if (scales < 0).any() or np.isinf(scales).any():
            raise malformed(self.name, "scales that are not negative", "a negative or infinite one")
        codes = data[4 * count :].reshape(count, self._width)
        rows = max(CHUNK // self.block, 1)
        whole = out.size // self.block
        for start in range(0, whole, rows):
            stop = min(start + rows, whole)
            target = out[start * self.block : stop * self.block].reshape(-1, self.block)
            self._expand(codes[start:stop], scales[start:stop], target)
        if whole < count:
            rest = np.empty((1, self.block), np.float32)
            self._expand(codes[whole:], scales[whole:], rest)
            out[whole * self.block :] = rest[0, : out.size - whole * self.block]

    def _expand(
        self, codes: ByteArray, scales: npt.NDArray[np.float32], target: FloatArray
    ) -> None:
        highest = 2 * self.levels
        mask = np.uint8((1 << self._bits) - 1)
        for i in range(8 // self._bits):
            if self._bits == 8:
                level = codes
            else:
                level = np.right_shift(codes, np.uint8(i * self._bits))
                np.bitwise_and(level, mask, out=level)
            if highest < mask and level.max(initial=0) > highest:
                raise malformed(self.name, f"codes up to {highest}", f"{level.max()}")
            target[:, i * self._width : (i + 1) * self._width] = level
        np.subtract(target, np.float32(self.levels), out=target)
        np.multiply(target, scales[:, None], out=target)


def _check_block(codec: str, name: str, value: int) -> None:
    require_whole(codec, name, value, 8)
    require(value % 8 == 0, codec, name, "a multiple of 8", value)


def _check_levels(codec: str, name: str, value: int) -> None:
    require_whole(codec, name, value, 1)
    require(value <= 127, codec, name, "at most 127", value)


_ROUNDING = one_word_of("stochastic", "nearest")


@dataclass(frozen=True)
class Int8(_Quantized):
    """One byte per element and one scale per block: levels -127 … 127 of ``max|u| / 127``.

    Stochastic rounding is unbiased: the mean over many draws is the value. A block with a NaN or
    an infinity decodes to NaN.

    Args:
        block: Elements per scale.
        rounding: ``'stochastic'`` (unbiased, error below one level) or ``'nearest'`` (error at
            most half a level).

    Reference: Dettmers, 2016, "8-Bit Approximations for Parallelism in Deep Learning",
    arXiv:1511.04561 (8-bit exchange with per-block scales).
    """

    block: int = option(1024, _check_block)
    rounding: Rounding = option("stochastic", _ROUNDING)

    name: ClassVar[str] = "int8"
    levels = 127
    norm = "max"

    @property
    def _stochastic(self) -> bool:
        return self.rounding == "stochastic"


@dataclass(frozen=True)
class Int4(_Quantized):
    """Half a byte per element and one scale per block: levels -7 … 7 of ``max|u| / 7``.

    Args:
        block: Elements per scale.
        rounding: As for :class:`Int8`.

    Reference: Dettmers and Zettlemoyer, 2023, "The case for 4-bit precision", arXiv:2212.09720
    (small blocks keep 4 bits useful).
    """

    block: int = option(256, _check_block)
    rounding: Rounding = option("stochastic", _ROUNDING)

    name: ClassVar[str] = "int4"
    levels = 7
    norm = "max"

    @property
    def _stochastic(self) -> bool:
        return self.rounding == "stochastic"


@dataclass(frozen=True)
class Dithering(_Quantized):
    """QSGD: ``sign(u) · norm · (⌊s|u|/norm⌋ + Bernoulli(fraction)) / s`` per block; unbiased.

    2 bits per element for s = 1 (three levels, as TernGrad), 4 up to s = 7, 8 up to s = 127. Here
    the floor is taken of ``s·u/norm`` itself, not of its size: the mean is the same.

    Args:
        levels: s, from 1 to 127.
        norm: ``'l2'`` as in the paper, or ``'max'`` (less noise).
        block: Elements per norm.

    References: Alistarh et al., 2017, "QSGD", arXiv:1610.02132; Wen et al., 2017, "TernGrad",
    arXiv:1705.07878.
    """

    levels: int = option(7, _check_levels)
    norm: Literal["l2", "max"] = option("max", one_word_of("l2", "max"))
    block: int = option(512, _check_block)

    name: ClassVar[str] = "dithering"


@dataclass(frozen=True)
class OneBit(Codec):
    """``sign(u) · mean|u|``: n/8 + 4 bytes. Biased, so it needs error feedback.

    On the wire: the mean size (float32), then the signs (1 is below zero), most significant bit
    first. A NaN or infinity makes the mean NaN or infinite, and all decoded values with it.

    References: Seide et al., 2014, "1-Bit Stochastic Gradient Descent" (Interspeech); Karimireddy
    et al., 2019, arXiv:1901.09847 (scaled sign with error feedback).
    """

    name: ClassVar[str] = "onebit"

    def max_size(self, size: int) -> int:
        """4 bytes and a bit per element."""
        return 4 + -(-size // 8)

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        check_vector(array)
        payload = np.empty(self.max_size(array.size), np.uint8)
        sizes = np.empty(min(array.size, CHUNK), np.float32)
        total = 0.0
        for part in chunks(array.size):
            values = array[part]
            payload[4 + part.start // 8 : 4 + -(-part.stop // 8)] = np.packbits(values < 0)
            total += float(np.add.reduce(np.abs(values, out=sizes[: values.size])))
        payload[:4].view("<f4")[0] = total / max(array.size, 1)
        return payload

    def decode(self, payload: Payload, out: FloatArray) -> None:
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(out.size))
        scale = np.ascontiguousarray(data[:4]).view("<f4")[0]
        if scale < 0:
            raise malformed(self.name, "a mean size that is not negative", f"{scale}")
        # Eight values per byte, looked up: a table of 8 KiB stays in the first-level cache.
        signs = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        table = np.where(signs, -scale, scale).astype(np.float32)
        codes = data[4:]
        whole = out.size // 8
        for part in chunks(whole, CHUNK // 8):
            target = out[8 * part.start : 8 * part.stop].reshape(-1, 8)
            np.take(table, codes[part], axis=0, out=target, mode="clip")
        if whole < codes.size:
            out[8 * whole :] = table[codes[whole], : out.size - 8 * whole]


_FP16_MAX = np.float32(65504.0)


class _Cast(Codec):
    """Base of the codecs that send each element as a number of another dtype, little-endian."""

    wire: ClassVar[str]

    def max_size(self, size: int) -> int:
        """As many bytes per element as the dtype has."""
        return np.dtype(self.wire).itemsize * size

    def decode(self, payload: Payload, out: FloatArray) -> None:
        np.copyto(out, self._numbers(payload, out.size))

    def _numbers(self, payload: Payload, size: int) -> npt.NDArray[Any]:
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(size))
        return np.ascontiguousarray(data).view(self.wire)


@dataclass(frozen=True)
class Raw(_Cast):
    """The float32 values as they are, little-endian: 4 bytes per element, nothing lost."""

    name: ClassVar[str] = "none"
    lossy: ClassVar[bool] = False
    sum_dtype: ClassVar[str | None] = "float32"
    wire: ClassVar[str] = "<f4"

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """A copy of the bytes of ``array``."""
        check_vector(array)
        return array.astype(self.wire).view(np.uint8)


@dataclass(frozen=True)
class FP16(_Cast):
    """IEEE half precision: 2 bytes per element, relative error at most 2⁻¹¹ from 6e-5 to 65504.

    Larger finite values become ±65504; smaller ones lose precision gradually, with an absolute
    error of at most 3e-8. NaN and infinity stay what they are: where the loss is scaled, they tell
    the optimizer to scale less.
    """

    name: ClassVar[str] = "fp16"
    feedback: ClassVar[bool] = False
    sum_dtype: ClassVar[str | None] = "float16"
    wire: ClassVar[str] = "<f2"

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Rounds to nearest."""
        check_vector(array)
        return to_float16(array, _FP16_MAX).view(np.uint8)


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16: 2 bytes per element, float32's range, relative error at most 2⁻⁸.

    NaN stays NaN; a finite value within 2⁻⁹ of float32's largest rounds to infinity.
    """

    name: ClassVar[str] = "bf16"
    feedback: ClassVar[bool] = False
    sum_dtype: ClassVar[str | None] = "bfloat16"
    wire: ClassVar[str] = "<u2"
    """The upper half of the bits."""

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Rounds to nearest, ties to even."""
        check_vector(array)
        halves = np.empty(array.size, self.wire)
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
        halves = self._numbers(payload, out.size)
        np.left_shift(halves, 16, out=out.view(np.uint32), dtype=np.uint32)


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
