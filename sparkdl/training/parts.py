"""Parts in which a gradient travels: where its flat buffer is cut, and what a part waits for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from sparkdl.weights import FloatArray, Layout, Slot

PART_BYTES = 16 << 20
"""A gradient is sent in parts of at most this size, each when the backward pass has computed it;
among more than 8 ranks parts are larger, see :data:`PORTION_BYTES`."""
PORTION_BYTES = 2 << 20
"""Least bytes of a part for each rank: a ring waits for two messages per rank and part."""
FLAGS = 2
"""Numbers behind the statistics in a reducer's buffer."""


def parts_of(
    layout: Layout, part_bytes: int, *, apart: bool = False, cuts: bool = True
) -> list[slice]:
    """Slices of ``[gradient | statistics | flags]`` in the order in which they are reduced.

    The first one has the end of the buffer, with statistics and flags; with ``apart`` it has
    nothing else: they are few, and known before any gradient. Small variables share a part. One
    that is larger than a part is cut into equal pieces.

    Args:
        layout: Layout of ``[gradient | statistics]``.
        part_bytes: Size of a part of the gradient at most.
        apart: Whether statistics and flags are a part of their own.
        cuts: False: each part holds whole variables, and is as large as the variable that fills it.

    >>> layout = Layout.of([('a', (4,), 'float32'), ('b', (8,), 'float32')], [])
    >>> parts_of(layout, 16, apart=True)
    [slice(12, 14, None), slice(8, 12, None), slice(4, 8, None), slice(0, 4, None)]
    >>> parts_of(layout, 16, apart=True, cuts=False)
    [slice(12, 14, None), slice(4, 12, None), slice(0, 4, None)]
    """
    trained = layout.trained_size
    edges = [layout.size + FLAGS]
    if apart and trained:
        edges.append(trained)
    for slot in reversed([s for s in layout.slots if s.offset < trained]):
        last = min(edges[-1], trained)
        before = last - slot.offset - slot.size
        if 8 * before >= part_bytes and 4 * (last - slot.offset) > part_bytes:
            edges.append(last - before)  # what half fills a part does not wait for this one
            last -= before
        if 4 * (last - slot.offset) >= part_bytes and slot.offset:
            edges.append(slot.offset)
    edges.append(0)
    parts = [slice(a, b) for b, a in itertools.pairwise(edges)]
    if not cuts:
        return parts
    return [piece for part in parts for piece in _pieces(part, trained, part_bytes)]


def _pieces(part: slice, trained: int, part_bytes: int) -> list[slice]:
    """Equal pieces of a part, the last one first; statistics and flags stay together."""
    size = min(part.stop, trained) - part.start
    count = max(1, -(-4 * size // part_bytes))
    edges = [part.start + size * i // count for i in range(count)]
    return [slice(a, b) for a, b in itertools.pairwise([*edges, part.stop])][::-1]


class Leaving(NamedTuple):
    """Parts that can leave at the same time.

    Args:
        variables: Numbers of the variables whose gradients they wait for: those that have at least
            one element in one of them.
    """

    parts: list[int]
    variables: list[int]


def leaving(parts: Sequence[slice], slots: Sequence[Slot]) -> list[Leaving]:
    """Parts by what they wait for, in their order: the pieces of one variable leave together.

    >>> layout = Layout.of([('a', (2,), 'float32'), ('b', (8,), 'float32')], [])
    >>> [tuple(group) for group in leaving(parts_of(layout, 16, apart=True), layout.slots)]
    [([0], []), ([1, 2], [1]), ([3], [0])]
    """
    groups: list[Leaving] = []
    for number, part in enumerate(parts):
        needed = [i for i, slot in enumerate(slots) if _common(part, slot)]
        if groups and set(needed) <= set(groups[-1].variables):
            groups[-1].parts.append(number)
        else:
            groups.append(Leaving([number], needed))
    return groups


def _common(part: slice, slot: Slot) -> range:
    return range(max(part.start, slot.offset), min(part.stop, slot.offset + slot.size))


def fill_part(
    part: slice, slots: Iterable[Slot], values: Iterable[npt.NDArray[Any]], buffer: FloatArray
) -> None:
    """Copies what belongs to ``part`` of each variable's values into a flat buffer.

    Args:
        slots: Slots of the variables; other elements of the part stay as they are.
        values: Values of any shape; a variable that has nothing in the part is not looked at.
        buffer: Buffer of the layout that the slots are of.
    """
    for slot, value in zip(slots, values, strict=True):
        place = _common(part, slot)
        if place:
            first, stop = place.start - slot.offset, place.stop - slot.offset
            buffer[place.start : place.stop] = value.reshape(-1)[first:stop]
