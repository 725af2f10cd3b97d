"""A model's variables as one flat float32 buffer, and the layout: which variable is where in it.

A buffer has two sections::

    [ trained: variables the optimizer moves | averaged: running statistics (BatchNorm) ]

Update rules act on the trained section; the averaged section is always averaged, never summed.
Integer variables, seeds and counters are not in the buffer: workers do not exchange them at each
step; they travel beside it (``RunState.carried``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ModelError

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Slot:
    """One variable's place in the flat buffer (``offset`` and ``size`` in elements)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Elements in one of its rows."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of all variables in a flat buffer.

    Args:
        slots: In buffer order, the trained ones first.
        trained_size: Elements in the trained section.
        size: Elements in all.
    """

    slots: tuple[Slot, ...]
    trained_size: int
    size: int

    @classmethod
    def of(
        cls,
        trained: Iterable[tuple[str, Sequence[int], str]],
        averaged: Iterable[tuple[str, Sequence[int], str]] = (),
    ) -> Layout:
        """Lays out ``(name, shape, dtype)`` triples one after the other.

        >>> layout = Layout.of([('w', (2, 3), 'float32')], [('mean', (3,), 'float32')])
        >>> layout.size, layout.trained_size
        (9, 6)
        """
        slots: list[Slot] = []
        offset = trained_size = 0
        for group in (trained, averaged):
            for name, shape, dtype in group:
                slots.append(Slot(name, tuple(int(d) for d in shape), dtype, offset))
                offset += slots[-1].size
            if group is trained:
                trained_size = offset
        return cls(tuple(slots), trained_size, offset)

    def without(self, places: Collection[int]) -> Layout:
        """The layout of all variables but those of some numbers, in the same order.

        >>> layout = Layout.of([('w', (2, 3), 'float32'), ('b', (3,), 'float32')])
        >>> layout.without([0]).slots
        (Slot(name='b', shape=(3,), dtype='float32', offset=0),)
        """
        if not places:
            return self
        kept = [s for i, s in enumerate(self.slots) if i not in places]
        sections = (
            [(s.name, s.shape, s.dtype) for s in kept if (s.offset < self.trained_size) is trained]
            for trained in (True, False)
        )
        return Layout.of(*sections)

    def copy_without(
        self, places: Collection[int], whole: FloatArray, part: FloatArray, *, back: bool = False
    ) -> None:
        """Copies a buffer of this layout into one of :meth:`without`; ``back``: the other way.

        The variables that ``part`` lacks are set to 0 on the way back.
        """
        start = 0
        for i, slot in enumerate(self.slots):
            mine = whole[slot.offset : slot.offset + slot.size]
            if i not in places:
                theirs = part[start : start + slot.size]
                start += slot.size
                np.copyto(*((mine, theirs) if back else (theirs, mine)))
            elif back:
                mine[...] = 0

    @property
    def num_trained(self) -> int:
        """Variables in the trained section."""
        return sum(slot.offset < self.trained_size for slot in self.slots)

    @property
    def size_bytes(self) -> int:
        """Bytes of one float32 buffer with this layout."""
        return 4 * self.size

    def matches(self, other: Layout) -> bool:
        """Whether a buffer of one fits the other: equal shapes and sections, whatever the names."""
        return self.trained_size == other.trained_size and (
            [s.shape for s in self.slots] == [s.shape for s in other.slots]
        )

    def require(self, model: Layout, whose: str) -> None:
        """Raises ModelError unless the layout of a worker's model :meth:`matches` this one."""
        if not model.matches(self):
            raise ModelError(
                f"the worker's model and {whose} differ",
                expected=f"{self.size} values in {len(self.slots)} variables",
                received=f"{model.size} values in {len(model.slots)} variables",
                hint="does the model build other layers on the executors?",
            )

    def views(self, flat: FloatArray) -> list[FloatArray]:
        """The variables as views into ``flat``, in slot order, without a copy.

        Raises:
            ConfigError: ``flat`` has another size or dtype than the layout.
        """
        self.check(flat)
        return [flat[s.offset : s.offset + s.size].reshape(s.shape) for s in self.slots]

    def flatten(self, arrays: Sequence[npt.ArrayLike], out: FloatArray | None = None) -> FloatArray:
        """Copies one array per slot into a flat float32 buffer (``out``, or a new one)."""
        flat = np.empty(self.size, np.float32) if out is None else out
        if len(arrays) != len(self.slots):
            raise ConfigError(
                "cannot flatten the weights", expected=f"{len(self.slots)} arrays",
                received=f"{len(arrays)}",
            )  # fmt: skip
        for slot, view, array in zip(self.slots, self.views(flat), arrays, strict=True):
            source = np.asarray(array)
            if source.shape != slot.shape:
                raise ConfigError(
                    f"cannot flatten variable {slot.name!r}", expected=f"shape {slot.shape}",
                    received=f"shape {source.shape}",
                )  # fmt: skip
            view[...] = source
        return flat

    def shards(self, count: int) -> list[slice]:
        """``count`` nearly equal slices that cover the buffer, for sharded servers and rings."""
        edges = [self.size * i // count for i in range(count + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def check(self, flat: npt.NDArray[Any]) -> None:
        """Raises ConfigError unless ``flat`` is a float32 vector of this layout's size."""
        if flat.ndim != 1 or flat.shape[0] != self.size or flat.dtype != np.float32:
            raise ConfigError(
                "the flat buffer does not fit the layout",
                expected=f"float32 of shape ({self.size},)",
                received=f"{flat.dtype} of shape {flat.shape}",
            )


NO_VALUES = Layout((), 0, 0)
"""The layout of a coordinator whose values lie on other servers."""


class NotFiniteError(Exception):
    """A worker's update is not finite; the loop finds out why and raises what the user sees.

    Args:
        batch: Which batch of the present stack made it, from 0; None: not known.
        joined: Whether it came from another worker, by a sum over the updates of all.
        among: The first of the batches that may have made it, and the one after the last, counted
            as ``batch`` is: below 0 for those of stacks before. None: those of the present window.
    """

    def __init__(
        self,
        batch: int | None = None,
        *,
        joined: bool = False,
        among: tuple[int, int] | None = None,
    ) -> None:
        super().__init__("an update is not finite")
        self.among = (batch, batch + 1) if batch is not None else among
        self.joined = joined


def is_finite(array: npt.NDArray[np.generic]) -> bool:
    """Whether all numbers of an array are finite; what is no floating-point array is."""
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
