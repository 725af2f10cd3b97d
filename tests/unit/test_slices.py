"""Gradients as rows with indices: how they are put together, and the bytes they travel as."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ProtocolError
from sparkdl.training.slices import (
    Slices,
    head_offset,
    join_slices,
    pack,
    pack_around,
    packed_bytes,
    unpack,
)
from sparkdl.weights import Layout


def some(place: int, count: int, width: int, seed: int = 0) -> Slices:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, width)).astype(np.float32)
    return Slices(place, rng.integers(0, 9, count).astype(np.int32), rows)


@given(
    head=st.binary(max_size=13),
    shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=3),
)
def test_bytes_come_back_as_they_were(head: bytes, shapes: list[tuple[int, int]]) -> None:
    slices = [some(place, *shape, seed=place) for place, shape in enumerate(shapes)]
    data = pack(np.frombuffer(head, np.uint8), slices)
    assert data.size == packed_bytes(len(head), slices)
    got, found = unpack(data)
    assert got.tobytes() == head
    assert [s.place for s in found] == [s.place for s in slices]
    for mine, theirs in zip(found, slices, strict=True):
        np.testing.assert_array_equal(mine.indices, theirs.indices)
        np.testing.assert_array_equal(mine.rows, theirs.rows)
        assert mine.rows.shape == theirs.rows.shape


def test_a_head_that_lies_in_the_buffer_already_stays() -> None:
    slices = [some(2, 3, 4)]
    out = np.zeros(packed_bytes(8, slices), np.uint8)
    out[head_offset(1) :].view(np.float32)[:2] = [1.5, 2.5]
    pack_around(out, 8, slices)
    head, _ = unpack(out)
    assert head.view(np.float32).tolist() == [1.5, 2.5]


@given(st.binary(max_size=80), st.integers(0, 79), st.integers(0, 255))
def test_what_is_no_slices_is_an_error(garbage: bytes, at: int, value: int) -> None:
    """Nothing but a ProtocolError, and nothing allocated by a size that the bytes claim."""
    whole = pack(np.zeros(4, np.uint8), [some(0, 2, 2)])
    changed = whole.copy()
    changed[at % changed.size] = value
    for data in (np.frombuffer(garbage, np.uint8), changed, whole[: at % whole.size]):
        try:
            head, found = unpack(data)
        except ProtocolError:
            continue
        assert head.size + sum(s.size_bytes for s in found) <= data.size


def test_rows_of_all_workers_follow_each_other_scaled_and_never_summed() -> None:
    first = [Slices(1, np.int32([3, 3]), np.float32([[1, 2], [3, 4]]))]
    second = [Slices(1, np.int32([3]), np.float32([[8, 8]]))]
    idle = [Slices.none(1, 2)]
    broken = [Slices(1, np.int32([0]), np.float32([[np.nan, 0]]))]
    (joined,) = join_slices([(1, first), (0, broken), (3, second), (0, idle)])
    assert joined.place == 1
    assert joined.indices.tolist() == [3, 3, 3]
    np.testing.assert_allclose(joined.rows, [[0.25, 0.5], [0.75, 1], [6, 6]])
    assert first[0].rows.tolist() == [[1, 2], [3, 4]]
    assert join_slices([(0, first)]) == []
    assert join_slices([(5, first), (0, idle)]) == first


def test_a_layout_without_some_variables() -> None:
    layout = Layout.of(
        [("a", (2,), "float32"), ("b", (3, 2), "float32"), ("c", (1,), "float32")],
        [("m", (2,), "float32")],
    )
    rest = layout.without([1])
    assert [(s.name, s.offset) for s in rest.slots] == [("a", 0), ("c", 2), ("m", 3)]
    assert (rest.trained_size, rest.size) == (3, 5)
    assert layout.without([]) is layout
    whole = np.arange(11, dtype=np.float32)
    part = np.empty(5, np.float32)
    layout.copy_without([1], whole, part)
    assert part.tolist() == [0, 1, 8, 9, 10]
    layout.copy_without([1], whole, part * 2, back=True)
    assert whole.tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 16, 18, 20]


@pytest.mark.parametrize("places", [[0], [0, 1]])
def test_a_layout_without_any_trained_variable(places: list[int]) -> None:
    layout = Layout.of([("a", (2,), "float32"), ("b", (3,), "float32")])
    assert layout.without(places).size == (3 if len(places) == 1 else 0)
