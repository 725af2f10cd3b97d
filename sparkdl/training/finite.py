"""``FiniteCheck``: keeps NaN and infinity of one worker out of what all workers share."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparkdl.training.slices import Slices
from sparkdl.weights import FloatArray, NotFiniteError, is_finite

PIECE = 1 << 18
"""Numbers that are looked at in one go, so that what NumPy notes of each stays small."""


class FiniteCheck:
    """Looks at every number that a worker is about to send.

    Args:
        on_nan: ``'raise'``, ``'skip'`` (the update is refused and counted) or ``'ignore'``.
        trained_size: Values at the front of a flat buffer that are trained. Behind them are
            statistics, in which infinity may be meant; NaN is not.
    """

    def __init__(self, on_nan: str, trained_size: int) -> None:
        self.refused = 0
        self._on_nan, self._trained_size = on_nan, trained_size
        self._noted: int | None = None

    @property
    def looks(self) -> bool:
        """Whether updates are looked at."""
        return self._on_nan != "ignore"

    @property
    def skips(self) -> bool:
        """Whether training goes on after an update that is not finite."""
        return self._on_nan == "skip"

    def admits(self, values: FloatArray, scaled: bool = False) -> bool:
        """Whether a whole flat buffer may be sent.

        Args:
            values: Weights, or gradients and statistics.
            scaled: Whether they are gradients of a scaled loss, of which infinite ones tell the
                optimizer to scale less.

        Raises:
            NotFiniteError: It is not finite, with ``'raise'``.
        """
        if scaled or self._is_finite(values, 0):
            return True
        if self._on_nan == "raise":
            raise NotFiniteError
        self.refused += 1
        return False

    def is_sound(
        self, values: FloatArray, first: int, scaled: bool, slices: Sequence[Slices]
    ) -> bool:
        """The answer that :meth:`notes` would give; nothing is counted."""
        return scaled or self._all_finite(values, first, slices)

    def notes(
        self,
        values: FloatArray,
        first: int,
        scaled: bool,
        batch: int = 0,
        slices: Sequence[Slices] = (),
    ) -> bool:
        """The same for a part of the buffer that begins at ``first``, inside a compiled step.

        ``batch`` is the number of the step in the compiled call; ``slices`` are the gradients that
        the buffer lacks.

        It does not raise there: the caller sends nothing of this step, and calls :meth:`settle`
        after the compiled call.
        """
        if self.is_sound(values, first, scaled, slices):
            return True
        if self.skips:
            self.refused += 1
        elif self._noted is None:
            self._noted = batch
        return False

    def settle(self) -> None:
        """Ends a compiled call.

        Raises:
            NotFiniteError: Not all was finite that :meth:`notes` has seen since the last call, with
                ``'raise'``.
        """
        noted, self._noted = self._noted, None
        if noted is not None:
            raise NotFiniteError(noted)

    def _all_finite(self, values: FloatArray, first: int, slices: Sequence[Slices]) -> bool:
        rows = () if not self.looks else (s.rows for s in slices)
        return self._is_finite(values, first) and all(map(is_finite, rows))

    def _is_finite(self, values: FloatArray, first: int) -> bool:
        if not self.looks:
            return True
        trained = max(0, self._trained_size - first)
        for start in range(0, min(trained, values.size), PIECE):
            if not is_finite(values[start : min(start + PIECE, trained)]):
                return False
        return trained >= values.size or not np.isnan(values[trained:]).any()


def finite_state(optimizer_state: bytes) -> bytes:
    """An optimizer state in which variables that are not finite begin again, at 0.

    Args:
        optimizer_state: What ``state`` of a learner's optimizer returned (npz).
    """
    with np.load(io.BytesIO(optimizer_state), allow_pickle=False) as arrays:
        values: list[npt.NDArray[np.generic]] = [arrays[f"arr_{i}"] for i in range(len(arrays))]
    buffer = io.BytesIO()
    np.savez(buffer, *(v if is_finite(v) else np.zeros_like(v) for v in values))
    return buffer.getvalue()
