"""What the workers of a run report, put together: the numbers behind History and progress bar."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdl.coordinator.status import Failure
from sparkdl.protocols import MetricState


@dataclass(frozen=True)
class EpochProgress:
    """One epoch over all workers.

    Args:
        missing: Workers that have yet to finish it. Where all train in step, a worker that died
            is not waited for: the epoch ends without it.
        batches: Batches trained in it so far.
        rows: Rows trained in it so far.
        metrics: Sum of the workers' metric states; Keras metrics hold sums and counts, so the
            value of the sum is the row-weighted value over all workers.
        val_metrics: The same of the validation rows; empty before they are evaluated.
        seconds: How long it took, where the workers say so; else None, and the driver's own
            clock says it.
    """

    missing: int
    batches: int
    rows: int
    metrics: MetricState
    val_metrics: MetricState
    seconds: float | None = None


@dataclass(frozen=True)
class RunProgress:
    """A run over all workers.

    Args:
        epochs: By number.
        batches_per_epoch: Steps of all workers in one epoch.
        rows: Rows that all workers have trained so far.
        joined: Workers that have joined.
        failure: The first worker that raised, or None.
        staleness: Mean commits between a pull and the commit that followed it.
    """

    epochs: dict[int, EpochProgress] = field(default_factory=dict)
    batches_per_epoch: int = 0
    rows: int = 0
    joined: int = 0
    failure: Failure | None = None
    staleness: float = 0.0
