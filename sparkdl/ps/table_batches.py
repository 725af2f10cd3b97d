"""``TableBatches``: how a worker that does not wait trains a model with rows in tables."""

from __future__ import annotations

import math

from sparkdl.ps.shards.rows import ServedRows
from sparkdl.training.learning import BatchStack, SharedLearner


class TableBatches:
    """Trains batch by batch: a batch's rows are pulled in it, and their gradients pushed after it.

    The model's own variables are exchanged after each window, as without tables. So the rows have a
    clock of their own: between a pull and the push other workers may have changed them.

    Args:
        rows: The tables.
    """

    def __init__(self, rows: ServedRows) -> None:
        self._rows = rows

    def train(self, learner: SharedLearner, stack: BatchStack, epoch: int, done: int) -> None:
        """Trains a stack.

        Args:
            learner: Its layers pull from the tables.
            stack: Batches.
            epoch: Of the stack.
            done: Batches of the epoch that are done after it.
        """
        first = done - stack.num_batches
        for number, batch in enumerate(stack.single_batches(), 1):
            rate, scale = learner.learning_rate, learner.tables.loss_scale
            before = 0 if scale is None else learner.step
            learner.train(batch)
            taken = scale is None or learner.step > before
            factor = (scale or 1.0) if taken else math.inf
            self._rows.end_step(epoch, first + number, rate, factor)
