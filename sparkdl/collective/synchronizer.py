"""How workers keep in step without a server: one all-reduce of gradients per step.

NumPy and protocols only: the learner and the communicator come by argument. The weights live on
the workers; they start equal, get equal gradients, and so stay equal to the bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.errors import ConfigError
from sparkdl.weights import FloatArray, Layout


class GradientLearner(Protocol):
    """A learner that takes a step in two halves.

    ``gradients`` writes the batch's mean gradient into the trained segment of ``out`` and its
    running statistics, after the batch, into the averaged segment. ``apply_gradients`` does the
    optimizer step with the trained segment and takes the statistics from the averaged one.
    """

    def read_weights(self, out: FloatArray) -> None: ...

    def write_weights(self, flat: FloatArray) -> None: ...

    def optimizer_state(self) -> bytes: ...

    def load_optimizer_state(self, state: bytes) -> None: ...

    def gradients(self, window: Any, out: FloatArray) -> None: ...

    def apply_gradients(self, flat: FloatArray) -> None: ...


class GradientSynchronizer:
    """Each step: the row-weighted mean of all ranks' gradients, then one optimizer step on each.

    With ``n_i`` rows on rank ``i``, ``g = Σ n_i g_i / Σ n_i``: what one process computes on the
    global batch. BatchNorm statistics, in the same buffer, are averaged alike. A rank that has run
    out of batches contributes nothing, blocks nobody, and takes every step with the others.

    Args:
        communicator: Connected; used by this synchronizer alone while it trains.
        layout: Of the flat buffer ``[gradient | statistics]``.
    """

    def __init__(self, communicator: Communicator, layout: Layout) -> None:
        self._communicator = communicator
        self._layout = layout
        # the last element is 1 where there is a batch: its mean tells whether anyone had one
        self._whole = np.zeros(layout.size + 1, np.float32)
        self._buffer = self._whole[:-1]

    def start(self, learner: GradientLearner, root: int = 0) -> None:
        """Gives every rank the root's weights and optimizer state."""
        learner.read_weights(self._buffer)
        self._communicator.broadcast(self._buffer, root, out=self._buffer)
        mine = self._communicator.rank == root
        learner.write_weights(self._buffer)
        state = np.frombuffer(learner.optimizer_state() if mine else b"", np.uint8)
        given = self._communicator.all_gather(state)[root]
        if not mine:
            learner.load_optimizer_state(given.tobytes())

    def step(self, learner: GradientLearner, batch: Any | None, rows: int) -> bool:
        """One step of all ranks together.

        Args:
            learner: Gives gradients, takes their mean.
            batch: What ``learner.gradients`` takes; None if this rank has no more rows.
            rows: Rows in ``batch``, 0 without one.

        Returns:
            Whether any rank had rows; if none had, nothing is applied.

        Raises:
            ConfigError: Rows without a batch, or a batch without rows.
        """
        if (batch is None) != (rows == 0):
            raise ConfigError(
                "a step without rows is one without a batch",
                expected="batch=None exactly if rows == 0",
                received=f"rows={rows}, batch is None: {batch is None}",
            )
        if batch is not None:
            learner.gradients(batch, self._buffer)
            self._whole[-1] = 1.0
        self._communicator.all_reduce(self._whole, "weighted", weight=rows, out=self._whole)
        if self._whole[-1] == 0.0:
            return False
        learner.apply_gradients(self._buffer)
        return True
