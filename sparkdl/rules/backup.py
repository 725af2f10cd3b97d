"""The center as each worker last saw it, kept on the server for rules that compare with it."""

from __future__ import annotations

import numpy as np

from sparkdl.rules.rule import State
from sparkdl.weights import FloatArray


class Backups:
    """One backup per worker in a rule's state, under ``'backup/<rank>'``.

    Before its first pull a worker has the initial center. A commit counts as the first half of a
    ``push_pull``, after which the worker has the center just written. (If it pulls later instead,
    ``Rule.pulled`` corrects that.)
    """

    @staticmethod
    def init(center: FloatArray) -> State:
        """The state at the start: the initial center alone."""
        return {"initial": center.copy()}

    @staticmethod
    def of(state: State, worker: int) -> FloatArray:
        """The worker's backup, to read and to write; made when first asked for."""
        key = f"backup/{worker}"
        if key not in state:
            state[key] = state["initial"].copy()
        backup: FloatArray = state[key]
        return backup

    @staticmethod
    def save(state: State, worker: int, center: FloatArray) -> None:
        """Keeps ``center`` as what ``worker`` has now."""
        key = f"backup/{worker}"
        if key in state:
            np.copyto(state[key], center)
        else:
            state[key] = center.copy()
