"""The reports of a rank on its training: with an exchange, and of an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MetricState = npt.NDArray[np.float64]
"""All metric variables of a model (loss first) as one vector; the vectors of workers add up."""


@dataclass(frozen=True)
class Report:
    """A worker's report on its work with an exchange.

    Args:
        batches_done: Batches trained in this epoch, this exchange included.
        windows_done: Windows trained in this epoch, this one included.
        learning_rate: The optimizer's rate in the first of these batches.
        metrics: The metric state of this epoch so far; None in most reports.
        window: Batches after each of which an exchange is due within the stack; 0: one is due
            after the stack.
    """

    epoch: int
    batches_done: int
    windows_done: int
    batches: int
    rows: int
    learning_rate: float
    metrics: MetricState | None = None
    window: int = 0


def no_metrics() -> MetricState:
    return np.empty(0, np.float64)


@dataclass(frozen=True)
class EpochReport:
    """A rank's report on one epoch, so far or at its end.

    Args:
        epoch: Its number, from 0.
        rows: Rows trained in it so far.
        metrics: The rank's metric state: sums and counts (float64), as Keras metrics hold them.
        ended: Whether the rank has ended the epoch.
        val_rows: Rows evaluated at its end.
        val_metrics: The metric state of those rows.
        batches_done: Batches of the epoch done, from a rank that commits nothing to a store.
        rows_done: Rows trained in all epochs, from a rank that commits nothing to a store.
    """

    epoch: int
    rows: int
    metrics: MetricState = field(default_factory=no_metrics)
    ended: bool = False
    val_rows: int = 0
    val_metrics: MetricState = field(default_factory=no_metrics)
    batches_done: int = 0
    rows_done: int = 0
