"""Parts of a gradient: cut anywhere, handed over once and in order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.training.parts import FLAGS, fill_part, leaving, parts_of
from sparkdl.weights import Layout


def layout_of(trained: list[int], averaged: list[int]) -> Layout:
    def slots(name: str, sizes: list[int]) -> list[tuple[str, tuple[int, ...], str]]:
        return [(f"{name}{i}", (size,), "float32") for i, size in enumerate(sizes)]

    return Layout.of(slots("t", trained), slots("a", averaged))


sizes = st.lists(st.integers(1, 60), max_size=6)


@given(sizes, sizes, st.integers(4, 300), st.booleans(), st.booleans())
def test_all_of_a_buffer_travels_once_from_its_end(
    trained: list[int], averaged: list[int], part_bytes: int, apart: bool, cuts: bool
) -> None:
    layout = layout_of(trained, averaged)
    parts = parts_of(layout, part_bytes, apart=apart, cuts=cuts)
    assert parts[0].stop == layout.size + FLAGS
    assert parts[-1].start == 0
    for part, after in itertools.pairwise(parts):
        assert after.stop == part.start
    for part in parts:
        within = min(part.stop, layout.trained_size) - part.start
        if cuts:
            assert 4 * within < part_bytes + 4
        else:
            ends = {0, layout.trained_size, *(s.offset for s in layout.slots)}
            assert part.start in ends
    if apart and trained:
        assert parts[0].start == layout.trained_size


@given(sizes, sizes, st.integers(4, 300))
def test_parts_leave_in_order_and_with_all_that_they_hold(
    trained: list[int], averaged: list[int], part_bytes: int
) -> None:
    layout = layout_of(trained, averaged)
    parts = parts_of(layout, part_bytes, apart=True)
    groups = leaving(parts, layout.slots)
    assert [n for group in groups for n in group.parts] == list(range(len(parts)))
    values = [np.arange(s.size, dtype=np.float32) + s.offset for s in layout.slots]
    buffer = np.full(layout.size, -1, np.float32)
    for group in groups:
        slots, known = ([of[i] for i in group.variables] for of in (layout.slots, values))
        for number in group.parts:
            fill_part(parts[number], slots, known, buffer)
            filled = buffer[parts[number]]
            assert (filled == np.arange(layout.size)[parts[number]]).all()
    assert (buffer == np.arange(layout.size)).all()


@pytest.mark.parametrize("cuts", [False, True])
def test_a_large_variable_does_not_hold_up_what_came_before(cuts: bool) -> None:
    """The last layer's gradient does not wait for that of the large layer before it."""
    layout = layout_of([10, 400, 60, 2], [])
    parts = parts_of(layout, 400, apart=True, cuts=cuts)
    large = [slice(310, 410), slice(210, 310), slice(110, 210), slice(10, 110)]
    head = [slice(472, 474), slice(410, 472)]
    assert parts == [*head, *(large if cuts else [slice(10, 410)]), slice(0, 10)]
    assert [tuple(g) for g in leaving(parts, layout.slots)][1:] == [
        ([1], [2, 3]), ([2, 3, 4, 5] if cuts else [2], [1]), ([6 if cuts else 3], [0]),
    ]  # fmt: skip
