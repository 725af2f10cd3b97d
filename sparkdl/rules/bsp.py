"""Bulk-synchronous rounds: the server waits for every worker and applies their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from sparkdl.rules.rule import Commit, Rule, State, require_payload
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class BSP(Rule):
    """Waits for all workers, then applies the row-weighted mean of what they sent.

    The server hands ``update`` the mean ``Σ rows_i · delta_i / Σ rows_i`` of the round.

    With payload ``'gradient'`` the reply is that mean gradient (``out = mean``), which every worker
    applies with its own optimizer: p workers with batch b are one process with batch p·b, exactly.
    With payload ``'delta'`` it is the new center, ``out = center + mean``.

    Args:
        payload: ``'gradient'`` (exact, an exchange per batch) or ``'delta'`` (local SGD).

    References: Valiant, 1990, "A Bridging Model for Parallel Computation" (CACM 33); for
    ``'delta'``: Stich, 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.
    """

    payload: Literal["delta", "gradient"] = "gradient"

    name: ClassVar[str] = "bsp"
    blocking: ClassVar[bool] = True
    default_window: ClassVar[int] = 1
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_payload(self.name, self.payload)

    @property
    def replies_mean(self) -> bool:
        """Unless a subclass has an ``update`` of its own."""
        return type(self).update is BSP.update and self.payload == "gradient"

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        """Writes the reply of the round: the mean gradient, or the center plus the mean delta."""
        if self.payload == "gradient":
            np.copyto(out, delta)
        else:
            np.add(center, delta, out=out)
