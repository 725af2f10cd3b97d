"""What the driver tells the workers while they train."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.changes import VariableChanges


@dataclass(frozen=True)
class Command:
    """All parts of it take effect together; workers that train in step see it at one step.

    Args:
        stop: All workers stop after the step that they are at.
        learning_rate: The rate to train on with; None: no change.
        release: Workers that wait for the driver at the end of this epoch go on; None: nobody.
        changes: What callbacks wrote to variables of the model; None: nothing.
    """

    stop: bool = False
    learning_rate: float | None = None
    release: int | None = None
    changes: VariableChanges | None = None
