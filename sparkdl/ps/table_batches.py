"""``TableBatches``: how a worker that does not wait trains a model with rows in tables."""

from __future__ import annotations

import math

from sparkdl.ps.shards.ahead import Wanted
from sparkdl.ps.shards.rows import RowsOfWorker
from sparkdl.training.learning import BatchStack, SharedLearner


class TableBatches:
    """Trains batch by batch: the next batch's rows are pulled meanwhile, gradients pushed after it.

    The model's own variables are exchanged after each window, as without tables. So the rows have a
    clock of their own: between a pull and the push other workers may have changed them. Where the
    rule exchanges rows in windows, they travel with the variables.
    """

    def __init__(self, rows: RowsOfWorker, learner: SharedLearner) -> None:
        self._rows, self._read = rows, learner.tables.id_reader()

    def train(self, learner: SharedLearner, stack: BatchStack, epoch: int, done: int) -> None:
        """Trains a stack."""
        first = done - stack.num_batches
        for number, batch in enumerate(stack.single_batches(), 1):
            self._rows.begin_batch(self._wanted(batch))
            rate, scale = learner.learning_rate, learner.tables.loss_scale
            before = 0 if scale is None else learner.step
            learner.train(batch)
            taken = scale is None or learner.step > before
            factor = (scale or 1.0) if taken else math.inf
            self._rows.end_step(epoch, first + number, rate, factor)

    def end_window(self, epoch: int, done: int) -> None:
        """The variables are exchanged now, and with them rows that are exchanged in windows."""
        self._rows.end_window(epoch, done)

    def _wanted(self, batch: BatchStack) -> Wanted | None:
        following = batch.following
        return None if following is None else lambda: self._read(following())
