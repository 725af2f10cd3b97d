"""Arrays whose memory begins where a cache line does, so that frameworks take it as it lies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Bytes: of a cache line, where TensorFlow's own tensors begin."""


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of undefined numbers whose memory begins at a multiple of :data:`ALIGNMENT`.

    One of objects (texts) lies anywhere: no framework takes its memory.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        return np.empty(shape, kind)
    size_bytes = math.prod(shape) * kind.itemsize
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size_bytes].view(kind).reshape(shape)


def as_aligned(array: npt.NDArray[Any], dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """The numbers of ``array`` as ``dtype``: the same object if nothing changes, else a copy.

    Args:
        array: Numbers.
        dtype: Of the result; that of ``array`` by default.
    """
    if (dtype is None or array.dtype == dtype) and is_aligned(array):
        return array
    copy = aligned_empty(array.shape, array.dtype if dtype is None else dtype)
    np.copyto(copy, array, casting="unsafe")
    return copy


def is_aligned(array: npt.NDArray[Any]) -> bool:
    """Whether the memory is one piece, may be written to, and begins where a cache line does."""
    flags = array.flags
    return flags.c_contiguous and flags.writeable and array.ctypes.data % ALIGNMENT == 0
