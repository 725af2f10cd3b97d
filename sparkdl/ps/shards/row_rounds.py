"""``RoundRows``: rows of tables that all workers step together, round by round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkdl.ps.client import Progress
from sparkdl.ps.shards.pushes import NO_CLOCK
from sparkdl.ps.shards.row_link import RowLink, RowPush
from sparkdl.ps.shards.rows import RowsOfWorker
from sparkdl.tables.service import IdArray, TableSpec
from sparkdl.weights import FloatArray


class RoundRows(RowsOfWorker):
    """Rows whose step is the row-weighted mean of all workers' gradients.

    A worker's part of a round is put aside on the shards before the coordinator hears of its
    commit; the members that the coordinator names then make one step of each row. Pulls bring that
    decision along (:mod:`sparkdl.ps.kinds`), so that a worker sees the rounds it has been told
    of.
    """

    def __init__(self, link: RowLink, tables: Sequence[TableSpec]) -> None:
        super().__init__(tables)
        self._link = link

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        self._begin_pull(training=training)
        ids = np.ascontiguousarray(ids, np.int64)
        found = self._link.fetch(table, ids, training=training)
        return found.rows, self._noted(table, ids, found.clocks, training=training)

    def end_step(
        self, epoch: int, batch: int, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        """Nothing to do: :meth:`put_aside` has sent what the step brings."""

    def put_aside(self, progress: Progress, sequence: int) -> None:
        """Sends this worker's part of the present round, also where it has no rows."""
        steps = self._take_step(1.0) if progress.rows else []
        self._forget()
        nowhere = [NO_CLOCK] * self._link.num_shards
        pushes = [
            RowPush(
                step.table, step.ids, step.gradients,
                step.counts if step.table in self._counted else None, None, nowhere,
            )
            for step in steps
        ]  # fmt: skip
        self._link.put_aside(pushes, progress, sequence)

    def close(self) -> None:
        self._link.close()

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self._link.bytes_moved
