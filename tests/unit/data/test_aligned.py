"""Arrays that frameworks take as they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.data.columns import ALIGNMENT, aligned_empty, as_aligned, is_aligned


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 0, 2), (7, 3, 2)])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "float64"])
def test_memory_begins_at_a_cache_line(shape: tuple[int, ...], dtype: str) -> None:
    for _ in range(20):
        array = aligned_empty(shape, dtype)
        assert array.shape == shape
        assert array.dtype == dtype
        if array.size:
            assert array.ctypes.data % ALIGNMENT == 0
            assert is_aligned(array)
        array[...] = 1
        assert array.sum() == array.size


def test_texts_lie_anywhere() -> None:
    array = aligned_empty((2, 3), object)
    array[...] = "text"
    assert array.shape == (2, 3)
    assert array.dtype == object


def test_nothing_is_copied_that_lies_right() -> None:
    right = aligned_empty((4, 16), "float32")
    right[...] = np.arange(64).reshape(4, 16)
    assert as_aligned(right) is right
    assert as_aligned(right, "float32") is right
    assert as_aligned(right[1:], "float32").base is right.base, "rows of a whole cache line"
    fixed = right.view()
    fixed.flags.writeable = False
    for other in (fixed, right[:, 1:], right.T, right[:, ::-1], right.ravel()[1:]):
        copy = as_aligned(other)
        assert is_aligned(copy)
        assert not np.shares_memory(copy, right)
        np.testing.assert_array_equal(copy, other)
    wide = as_aligned(right, np.float64)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, right)
    np.testing.assert_array_equal(as_aligned(np.array([200, 3], np.uint8), "float32"), [200.0, 3.0])
