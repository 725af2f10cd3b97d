"""Computing block by block: every element once, in one thread or several."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.optimizers.blocks import BLOCK, add_scaled, blocks, each_block, use_threads
from sparkdl.weights import FloatArray


@given(size=st.integers(0, 5 * BLOCK), first=st.integers(0, 7))
def test_blocks_cover_everything_once(size: int, first: int) -> None:
    seen = np.zeros(size, np.int8)
    for part in blocks(size, first):
        seen[part] += 1
    assert (seen == 1).all()


@pytest.fixture
def three_threads() -> Iterator[None]:
    use_threads(3)
    yield
    use_threads(1)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("size", [0, 1, 3 * BLOCK, 8 * BLOCK + 5, 13 * BLOCK])
def test_threads_cover_everything_once(size: int) -> None:
    seen, threads = np.zeros(size, np.int8), set()

    def body(part: slice, buffer: FloatArray) -> None:
        threads.add(threading.get_ident())
        assert buffer.size == part.stop - part.start
        seen[part] += 1

    each_block(size, body, 1)
    assert (seen == 1).all()
    assert len(threads) <= 3


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_a_thread_is_raised_when_all_have_ended() -> None:
    size, done = 12 * BLOCK, []

    def body(part: slice) -> None:
        if part.stop == size:
            raise FloatingPointError("the last block")
        done.append(part.start)

    with pytest.raises(FloatingPointError, match="last block"):
        each_block(size, body)
    assert len(done) == 11


@pytest.mark.parametrize("factor", [1.0, -0.25])
@pytest.mark.parametrize("size", [0, 3, BLOCK + 1])
def test_add_scaled_in_place_and_apart(size: int, factor: float) -> None:
    center, delta = np.full(size, 2.0, np.float32), np.arange(size, dtype=np.float32)
    want = center + np.float32(factor) * delta
    apart = np.empty_like(center)
    add_scaled(center, delta, factor, apart)
    add_scaled(center, delta, factor, center)
    np.testing.assert_array_equal(apart, want)
    np.testing.assert_array_equal(center, want)
