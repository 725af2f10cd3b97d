"""How much of a worker's change counts where the changes of several workers are added up.

Along a direction in which the loss is steep, every worker goes the whole way to the lowest point in
one window. Two workers that began at the same center then take it twice as far, and the center
swings from side to side: with two workers and long windows the swing hardly fades at all. Along the
other directions all changes are wanted in full. Which case prevails is seen in what the worker
trains next::

    d = cos(moved, next) - cos(mine, next)

``mine`` is this worker's last change, ``moved`` what the center moved meanwhile by the changes of
all, ``next`` the worker's change from there. Where the changes of the others help, ``next`` goes on
with all of them as much as with the worker's own, and d is about 0. Where they went too far,
``next`` takes back a part of them, and d is below 0. Taking the difference removes what noise makes
of consecutive changes of one worker alone.

With momentum, consecutive changes of one worker go the same way whatever the others do, so
``cos(mine, next)`` is above 0. Then what momentum carries over from the worker's last change is
taken out of the next one first, which leaves what the others' changes alone do to it::

    d = cos(moved, next) - cos(mine, next) cos(moved, mine)

Both are the same where ``cos(mine, next)`` is 0. Two workers with longer windows keep half of the
first d there: when momentum is mistaken for overshoot they train as the average of two, which costs
them little, and at a high rate of Adam nothing else keeps them from going too far. With windows
shorter than :data:`LONG_WINDOW` consecutive changes share nearly all of their momentum, so that the
first d would make every fit with Adam an average; there two workers take the second d, too.

The part that counts is ``clip(1 + GAIN · mean(d), 1/p, 1)`` for p workers. ADR 0061 has the
measurements.
"""

from __future__ import annotations

import math

import numpy as np

from sparkdl.weights import FloatArray

GAIN = 10.0
CAUTION = 0.5
"""Part of the difference of the cosines that d is with two workers, momentum and longer windows."""
LONG_WINDOW = 4
"""Least batches of a longer window."""
MEMORY = 0.9
"""Weight of what was seen before in the mean of d, at each exchange."""
LOOK_EVERY = 4
"""Batches between two looks: each exchange with windows as long as that, fewer with shorter ones,
whose exchanges a look would make noticeably longer."""
MOST_VALUES = 1 << 15
"""The most values that are looked at: every n-th of a larger model, for cosines within 1 %."""


class Damping:
    """The part of one worker's changes that counts; see the module. Not thread-safe.

    Args:
        num_workers: Whose changes are added up.
        trained_size: Values at the front of a flat buffer that are trained.
    """

    def __init__(self, num_workers: int, trained_size: int) -> None:
        self.factor = 1.0
        self._least = 1.0 / num_workers
        self._trained_size = trained_size
        self._looked_at = slice(0, trained_size, -(-trained_size // MOST_VALUES) or 1)
        self._mean = 0.0
        self._sum, self._changes = 0.0, 0
        self._base: FloatArray | None = None
        self._change: FloatArray | None = None
        self._length = 0.0  # of the last change
        self._unseen = LOOK_EVERY  # batches since the last look began

    def apply(self, change: FloatArray, base: FloatArray, batches: int) -> None:
        """Leaves the part of a change that counts.

        Args:
            change: What a window changed, as it is about to be sent; scaled in place.
            base: The center from which the window began.
        """
        self._unseen += batches
        due = self._unseen >= LOOK_EVERY
        if due or self._change is not None:  # a look compares two changes that follow each other
            with np.errstate(all="ignore"):  # whether weights are finite is for others to say
                self._observe(change[self._looked_at].copy(), base[self._looked_at], batches, due)
        self._sum, self._changes = self._sum + self.factor, self._changes + 1
        if self.factor < 1.0:
            change[: self._trained_size] *= np.float32(self.factor)

    @property
    def counted(self) -> float:
        """The mean of the parts so far; 1 before the first change."""
        return self._sum / self._changes if self._changes else 1.0

    def _observe(self, change: FloatArray, base: FloatArray, batches: int, keeps: bool) -> None:
        """Compares a change with the one before, if that was kept; keeps it for the next."""
        length = _length(change)
        if self._base is not None and self._change is not None:
            moved = base - self._base
            difference = self._difference(moved, self._change, change, length, batches)
            self._mean = MEMORY * self._mean + (1 - MEMORY) * difference
            self.factor = min(1.0, max(self._least, 1.0 + GAIN * self._mean))
        self._base, self._change = (base.copy(), change) if keeps else (None, None)
        self._length, self._unseen = length, 0 if keeps else self._unseen

    def _difference(
        self, moved: FloatArray, mine: FloatArray, change: FloatArray, length: float, batches: int
    ) -> float:
        """The module's d: below 0 where ``change`` takes back what the others did."""
        distance = _length(moved)
        own = _cosine(mine, change, self._length * length)
        along = _cosine(moved, change, distance * length)
        if own <= 0 or distance == 0:
            return along - own
        if self._least == 0.5 and batches >= LONG_WINDOW:  # two workers
            return CAUTION * (along - own)
        return along - own * _cosine(moved, mine, distance * self._length)


def _length(a: FloatArray) -> float:
    return math.sqrt(float(a @ a))


def _cosine(a: FloatArray, b: FloatArray, lengths: float) -> float:
    """The cosine of the angle between two vectors; 0 if one is 0 or has no finite length."""
    value = float(a @ b) / lengths if lengths > 0 else 0.0
    return value if math.isfinite(value) else 0.0
