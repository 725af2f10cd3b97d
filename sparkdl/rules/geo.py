"""Geo-SGD: each worker keeps its own weights and sends a share of its change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from sparkdl.rules.rule import Peer, Rule, unbound
from sparkdl.settings.values import require_whole
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class GeoSGD(Rule):
    """Each worker sends a p-th of its change, and adds the others' changes to its weights.

    On the worker, every window (``old`` is ``base``)::

        d = (local - old) / p;   push d;   old += d
        pull center;             local += center - old;   old = center

    and on the server ``center += d``. Unlike DOWNPOUR, a worker keeps its own progress instead of
    jumping to the center. One worker alone always equals the center. Rows of tables on servers go
    the same way, those that the window has trained.

    Args:
        num_workers: p; ``bind`` fills it in.

    Reference: PaddlePaddle's Geo mode (``GeoCommunicator``), Baidu, 2020; the equations are
    written from its description.
    """

    num_workers: int | None = None

    name: ClassVar[str] = "geo"
    default_window: ClassVar[int] = 100
    rows_in_windows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole(self.name, "num_workers", self.num_workers, 1, or_none=True)

    def bind(self, num_workers: int) -> GeoSGD:
        return replace(self, num_workers=num_workers)

    def exchange(self, local: FloatArray, base: FloatArray, peer: Peer) -> None:
        """Sends this worker's share, and adds the others' changes to ``local``."""
        if self.num_workers is None:
            raise unbound(self.name)
        np.subtract(local, base, out=peer.buffer)
        if self.num_workers > 1:
            np.multiply(peer.buffer, np.float32(1.0 / self.num_workers), out=peer.buffer)
        np.add(base, peer.buffer, out=base)
        peer.push_pull()
        np.subtract(local, base, out=local)
        np.add(local, peer.buffer, out=local)
        base[...] = peer.buffer
